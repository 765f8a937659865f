"""Degradation with depth: plain stacks stop learning where residual ones of as many weight layers go on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import xarray as xr

from resstream.errors import LabError
from resstream.lab.branches import Layer, Perceptron
from resstream.lab.experiments.parts.claims import Claim, judge
from resstream.lab.experiments.parts.outcome import View, outcome, spelled
from resstream.lab.experiments.parts.races import race
from resstream.lab.experiments.parts.slopes import check_slope
from resstream.lab.nets import Net, mlp
from resstream.lab.tasks import Task, spirals
from resstream.lab.training import Training, train
from resstream.result import Result

DEPTHS, STEPS = (2, 8, 16, 24, 32, 48), 500
# From how many steps on a claim can be made.
ENOUGH = 120
# What is said of plain stacks by their number of weight layers; residual ones are said to score 1.
REFERENCE = {8: 1.0, 24: 0.628, 48: 0.502}
SOURCE = "a common claim, after He et al. 2015, Deep residual learning, figure 1"


def depth_degradation(
    *, depths: Sequence[int] = DEPTHS, steps: int = STEPS, seeds: int = 8, progress: bool = False
) -> Result:
    """Train plain and residual stacks of more and more weight layers on three spirals.

    >>> from resstream import lab
    >>> r = lab.experiments.depth_degradation(depths=(2, 4), steps=10, seeds=1)
    >>> r.data.final.dims, r.data.rule.values.tolist(), r.check.passed
    (('rule', 'depth', 'seed'), ['plain', 'residual'], True)

    A plain layer is x <- tanh(x W); a residual block, x <- x + tanh(x W1) W2, has two weight layers.

    Args:
        depths: numbers of weight layers, even ones.
        steps: number of steps, of Adam.
        seeds: number of nets of each kind and depth.
        progress: show a progress bar.
    Returns:
        Result over (rule, depth, seed): `final`, the accuracy after the last step, which is 1/3 by chance and 0.53 for
        a linear classifier; `final_loss` in nats; `first_full`, `onset` and `diverged` as in `skip_training`. Over
        (rule, depth, step, seed): `accuracy` and `loss`.
    Raises:
        LabError: an odd number of weight layers, no seeds, or no such net or training.
    Source:
        He et al. 2015, Deep residual learning for image recognition, section 4.1 and figure 1.
    """
    if odd := [depth for depth in depths if depth < 2 or depth % 2]:
        raise LabError(
            f"depths={odd}: a residual block has two weight layers; give even numbers, such as depths=(2, 8)"
        )

    def races(depth: int) -> xr.Dataset:
        def run(rule: str, seed: int) -> Training:
            return train(*_net(rule, depth, seed), steps=steps)

        return race("rule", ["plain", "residual"], run, steps=steps, seeds=seeds, progress=progress)

    data = xr.concat([races(depth) for depth in depths], dim="depth").assign_coords(depth=list(depths))
    data = data.transpose("rule", "depth", ...)
    told = {"plain": REFERENCE, "residual": dict.fromkeys(depths, 1.0)}
    data["final_reference"] = (
        ("rule", "depth"),
        [[told[rule].get(depth, np.nan) for depth in depths] for rule in told],
    )
    shallow = [_net(rule, min(depths), 0, torch.float64)[0] for rule in told]
    means = data.final.mean("seed")
    return outcome(
        "depth_degradation",
        "stacks on three spirals",
        data,
        views=[
            View("final", "depth", "rule", "weight layers", "accuracy after training", share=True),
            View("final_loss", "depth", "rule", "weight layers", "loss after training (nats)"),
        ],
        claims=_claims(data) if steps >= ENOUGH else [],
        check=check_slope(shallow, spirals()),
        headline="accuracy, plain / residual: "
        + ", ".join(
            f"{plain:.3f} / {residual:.3f} at {depth}"
            for depth, (plain, residual) in zip(depths, means.values.T, strict=True)
        ),
        settings={"seeds": seeds, "steps": steps},
    )


def _net(rule: str, depth: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Net, Task]:
    task = spirals()
    branch = Layer("tanh", 0.7) if rule == "plain" else Perceptron(std=(0.7, 0.7))
    return mlp(rule, depth=depth // branch.matrices, branch=branch, ends=task.ends, seed=seed, dtype=dtype), task


def _claims(data: xr.Dataset) -> list[Claim]:
    plain, residual = data.final.sel(rule="plain"), data.final.sel(rule="residual")
    said = {depth: value for depth, value in REFERENCE.items() if depth in data.depth}
    claims = []
    for depth, value in said.items():
        found = plain.sel(depth=depth).values
        near = bool(abs(found.mean() - value) <= 0.1)
        because = "" if near else _spread(found)
        claims.append(
            Claim(
                "B1",
                f"{depth} plain weight layers reach this accuracy",
                SOURCE,
                f"{value:.3f}",
                spelled(found, scale="share"),
                judge(near),
                because,
            )
        )
    claims.append(
        Claim(
            "B1",
            f"residual stacks of up to {int(data.depth.max())} weight layers all reach 1.0",
            SOURCE,
            "1.000",
            ", ".join(f"{float(residual.sel(depth=depth).mean()):.3f} at {depth}" for depth in data.depth.values),
            judge(bool((residual.mean("seed") >= 0.99).all())),
        )
    )
    return claims


def _spread(found: np.ndarray) -> str:
    return "at this depth it depends on the seed whether a net learns: " + ", ".join(f"{each:.2f}" for each in found)
