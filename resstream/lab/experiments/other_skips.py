"""Other skips than the identity: factors, gates, a projection and dropout, before training and in it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xarray as xr
from tqdm.auto import tqdm

from resstream.lab.branches import Perceptron
from resstream.lab.experiments.parts.claims import Claim, judge
from resstream.lab.experiments.parts.outcome import View, outcome, require_seeds
from resstream.lab.experiments.parts.races import race
from resstream.lab.experiments.parts.slopes import check_slope, gradients_by_boundary
from resstream.lab.nets import Net, mlp
from resstream.lab.rules import DropoutSkip, GatedSkip, ProjectedSkip, Residual, Rule, ScaledSkip
from resstream.lab.tasks import Task, rings
from resstream.lab.training import Training, train
from resstream.result import Result

# The rule, the factor on the start of its branches, and the error of ResNet-110 on CIFAR-10 in percent; where training
# failed, with more than 20, there is none.
KINDS: Mapping[str, tuple[Rule, float, float]] = {
    "identity": (Residual(), 1.0, 6.61),
    "gate, bias -6": (GatedSkip(bias=-6.0), 1.0, 8.70),
    "projection": (ProjectedSkip(), 1.0, 12.22),
    "0.5 on both": (ScaledSkip(0.5), 0.5, 12.35),
    "gate, bias 0": (GatedSkip(bias=0.0), 1.0, np.nan),
    "dropout 0.5": (DropoutSkip(0.5), 1.0, np.nan),
}
SOURCE = "He et al. 2016, Identity mappings, table 1"


def other_skips(*, depth: int = 24, steps: int = 80, seeds: int = 3, progress: bool = False) -> Result:
    """Hold skips that do something to the stream against those that pass it on as it is.

    >>> from resstream import lab
    >>> r = lab.experiments.other_skips(depth=6, steps=5, seeds=1)
    >>> r.data.ratio.dims, r.data.rule.values[:2].tolist(), r.check.passed
    (('rule', 'seed'), ['identity', 'gate, bias -6'], True)

    Args:
        depth: number of blocks.
        steps: number of steps, of Adam.
        seeds: number of nets of each kind.
        progress: show a progress bar.
    Returns:
        Result over (rule, seed): `ratio`, the norm of the loss's gradient at the input over that at the last state,
        before training; `final` and `final_loss`, accuracy and loss where training ended. Over rule: `paper_error`, the
        error of ResNet-110 on CIFAR-10 in percent, NaN where its training failed. Over (rule, step, seed): `accuracy`,
        and `loss` in nats.
    Raises:
        LabError: no seeds, or no such net or training.
    Source:
        He et al. 2016, Identity mappings in deep residual networks, table 1.
    """
    ratios = []
    with tqdm(total=len(KINDS) * len(require_seeds(seeds)), desc="other skips", disable=not progress) as bar:
        for kind in KINDS:
            slopes = [gradients_by_boundary(*_net(kind, depth, seed)) for seed in range(seeds)]
            ratios.append([float(each[0].norm() / each[-1].norm()) for each in slopes])
            bar.update(seeds)

    def run(kind: str, seed: int) -> Training:
        return train(*_net(kind, depth, seed), steps=steps, seed=seed)

    data = xr.Dataset({"ratio": (("rule", "seed"), ratios)}, coords={"rule": list(KINDS)})
    data = data.merge(race("rule", list(KINDS), run, steps=steps, seeds=seeds, progress=progress))
    data["paper_error"] = "rule", [error for _, _, error in KINDS.values()]
    found = [_spelled(data.sel(rule=kind)) for kind in KINDS]
    return outcome(
        "other_skips",
        f"{depth} blocks on three rings",
        data,
        views=[
            View("ratio", "rule", "", "skip", "gradient at the input / at the end", "y"),
            View("accuracy", "step", "rule", "step", "accuracy", share=True),
            View("final_loss", "rule", "", "skip", "loss after training (nats)", "y"),
            View("paper_error", "rule", "", "skip", "error of ResNet-110 (%)"),
        ],
        claims=[_claim(data)],
        # In few blocks: what is left of a gradient below many of them is too little for differences to resolve.
        check=check_slope([_net(kind, 4, 0)[0] for kind in KINDS], _net("identity", 4, 0)[1]),
        headline=f"gradient that reaches the input, loss after {steps} steps: {'; '.join(found)}",
        settings={"depth": depth, "seeds": seeds, "steps": steps},
    )


def _net(kind: str, depth: int, seed: int) -> tuple[Net, Task]:
    rule, factor, _ = KINDS[kind]
    task, branch = rings(150, scale=1 / 3), Perceptron(std=(0.5, 0.5 * factor))
    return mlp(rule, depth=depth, branch=branch, ends=task.ends, seed=seed), task


def _spelled(row: xr.Dataset) -> str:
    return f"{row.rule.item()} {float(np.exp(np.log(row.ratio).mean())):.2g}, {float(row.final_loss.mean()):.2f}"


def _claim(data: xr.Dataset) -> Claim:
    loss, gradient = data.final_loss.mean("seed"), data.ratio.mean("seed")
    first, others = {"rule": "identity"}, {"rule": list(KINDS)[1:]}
    worse = bool((loss.sel(others) > float(loss.sel(first))).all())
    weaker = bool((gradient.sel(others) < float(gradient.sel(first))).all())
    return Claim(
        "A4",
        "no other skip passes as much gradient as the identity, or trains as well in as many steps",
        SOURCE,
        "ResNet-110 on CIFAR-10: " + ", ".join(f"{kind} {_error(error)}" for kind, (_, _, error) in KINDS.items()),
        "gradient, loss: " + "; ".join(_spelled(data.sel(rule=kind)) for kind in KINDS),
        judge(worse and weaker),
    )


def _error(error: float) -> str:
    return "failed" if np.isnan(error) else f"{error:.2f} %"
