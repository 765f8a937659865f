"""Path lengths of a trained stack: how many paths have each length, and which lengths the gradient comes from."""

from __future__ import annotations

from math import comb

import numpy as np
import xarray as xr
from tqdm.auto import tqdm

from resstream.check import Check
from resstream.lab.branches import Perceptron
from resstream.lab.experiments.parts.claims import Claim, judge
from resstream.lab.experiments.parts.outcome import View, outcome, require_seeds, spelled
from resstream.lab.nets import Net, mlp
from resstream.lab.tasks import Task, rings
from resstream.lab.training import train
from resstream.measure.metrics import logit_diff
from resstream.measure.paths import path_lengths
from resstream.result import Result

# ResNet-110 on CIFAR-10: its blocks, and the lengths of path that its gradient comes from.
BLOCKS, LOW, HIGH = 54, 5, 17
SOURCE = "Veit, Wilber, Belongie 2016, section 4.3"


def path_length_counts(
    *, depth: int = BLOCKS, steps: int = 120, points: int = 6, seeds: int = 3, progress: bool = False
) -> Result:
    """Hold the number of paths of each length against what they carry of the gradient of a trained residual stack.

    >>> from resstream import lab
    >>> r = lab.experiments.path_length_counts(depth=6, steps=20, points=3, seeds=1)
    >>> r.data.counted.values.round(3).tolist(), r.check.passed
    ([0.016, 0.094, 0.234, 0.312, 0.234, 0.094, 0.016], True)

    Args:
        depth: number of blocks; ResNet-110 has 54.
        steps: number of steps of training on three rings, of heavy-ball momentum.
        points: of how many points the gradient is split.
        seeds: number of nets.
        progress: show a progress bar.
    Returns:
        Result over path_length: `counted`, the share of all 2^n paths that are so long; over (path_length, seed):
        `carried`, the share of Veit's histogram, the number of paths times the mean norm of the gradient along one, and
        `summed`, the signed share of the gradient that all of them together make up, each the mean over points. Over
        seed: `low`, `high`, the shortest range of lengths with 95% of `carried`, means over points, `held`, the share
        of all paths in it, and `accuracy`.
    Raises:
        LabError: no seeds, or no such net or training.
    Source:
        Veit, Wilber, Belongie 2016, Residual Networks Behave Like Ensembles of Relatively Shallow Networks, section
        4.3.
    """
    rows, errors = [], []
    for seed in tqdm(require_seeds(seeds), desc="path lengths of trained nets", disable=not progress):
        net, task = _net(depth, seed)
        run = train(net, task, steps=steps, rate=0.015, method="momentum")
        chosen = np.linspace(0, len(task.labels) - 1, points).astype(int).tolist()
        labels = task.labels[chosen].tolist()
        metric = logit_diff(labels, [(label + 1) % task.classes for label in labels])
        found = path_lengths(run.net, task.prompts[chosen], metric, unit="layer", signs=0, samples=16, seed=seed)
        errors.append(found.check.error)
        mean = found.data[["veit", "share", "effective_low", "effective_high", "effective_share"]].mean("prompt")
        rows.append(mean.assign(accuracy=float(run.accuracy[-1])))
    data = xr.concat(rows, dim="seed").rename(
        veit="carried", share="summed", effective_low="low", effective_high="high", effective_share="held"
    )
    data = data.assign_coords(seed=np.arange(seeds))
    data["counted"] = "path_length", [comb(depth, length) / 2**depth for length in range(depth + 1)]
    # A view of both in one picture.
    both = [data.counted.expand_dims(seed=data.seed), data.carried]
    data["histogram"] = xr.concat(both, dim="kind").assign_coords(kind=["number of paths", "gradient"])
    low, high = float(data.low.mean()), float(data.high.mean())
    return outcome(
        "path_length_counts",
        f"{depth} trained residual blocks",
        data,
        views=[
            View("histogram", "path_length", "kind", "length of path", "share"),
            View("summed", "path_length", "", "length of path", "signed share of the gradient"),
        ],
        claims=_claims(data, depth),
        check=Check("sum over lengths = autograd's gradient", max(errors), 1e-8),
        headline=f"paths are {depth / 2:g} long on average; 95% of the gradient's histogram is in lengths {low:.0f} to "
        f"{high:.0f}, a share of {float(data.held.mean()):.1e} of all paths",
        settings={"depth": depth, "seeds": seeds, "steps": steps, "points": points},
    )


def _net(depth: int, seed: int) -> tuple[Net, Task]:
    task = rings(150, scale=1 / 3, head_std=0.3)
    return mlp("residual", depth=depth, branch=Perceptron(std=(0.5, 0.5)), ends=task.ends, seed=seed), task


def _claims(data: xr.Dataset, depth: int) -> list[Claim]:
    lengths = data.path_length
    middle = (data.carried * lengths).sum("path_length").values
    claims = [
        Claim(
            "C3",
            f"the number of paths of each length is binomial, centred at {depth / 2:g} of {depth}",
            "Veit, Wilber, Belongie 2016, section 3.2",
            f"mean {depth / 2:g}",
            f"mean {float((data.counted * lengths).sum()):.4g}",
            judge(abs(float((data.counted * lengths).sum()) - depth / 2) < 1e-9),
        ),
        Claim(
            "C3",
            "so the gradient comes from paths of about half the depth",
            "a common claim",
            f"mean {depth / 2:g}",
            f"mean {spelled(middle)}",
            judge(bool(abs(middle.mean() - depth / 2) < depth / 20)),
            "each hop multiplies a path's gradient by a Jacobian that is smaller than 1 on average, and that outweighs "
            "the number of longer paths",
        ),
    ]
    if depth == BLOCKS:
        paper = sum(comb(BLOCKS, length) for length in range(LOW, HIGH + 1)) / 2**BLOCKS
        held = data.held.values
        claims.append(
            Claim(
                "C3",
                "nearly all gradient comes from short paths, a small share of all",
                SOURCE,
                f"lengths {LOW} to {HIGH} of {BLOCKS}, a share of {paper:.4%} of all paths",
                f"lengths {data.low.values.mean():.3g} to {data.high.values.mean():.3g}, a share of {held.mean():.1e}",
                judge(bool(held.mean() < 0.05)),
            )
        )
    return claims
