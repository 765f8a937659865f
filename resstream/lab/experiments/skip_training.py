"""Skips with a factor in training: which stacks learn an easy task, how soon, and which run away."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr

from resstream.lab.branches import Perceptron
from resstream.lab.experiments.parts.claims import Claim, judge
from resstream.lab.experiments.parts.outcome import View, outcome
from resstream.lab.experiments.parts.races import race
from resstream.lab.experiments.parts.slopes import check_slope
from resstream.lab.nets import Net, mlp
from resstream.lab.rules import ScaledSkip
from resstream.lab.tasks import Task, rings
from resstream.lab.training import Training, train
from resstream.result import Result

DEPTH, STEPS, RATE = 50, 1400, 0.012
SCALES = (0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1)
# The steps at which the loss is said to be no number any more.
REFERENCE = {1.05: 1554.0, 1.1: 218.0}
SOURCE = "a common claim, after He et al. 2016, Identity mappings, section 3.1"


def skip_training(
    *,
    scales: Sequence[float] = SCALES,
    depth: int = DEPTH,
    steps: int = STEPS,
    seeds: int = 1,
    progress: bool = False,
) -> Result:
    """Train stacks whose skips have a factor on three rings, and follow which of them learn.

    >>> from resstream import lab
    >>> r = lab.experiments.skip_training(scales=(1.0, 1.3), depth=20, steps=30)
    >>> r.data.accuracy.sizes["step"], r.data.onset.values.tolist(), r.check.passed
    (31, [[nan], [3.0]], True)

    Args:
        scales: factors lambda of x <- lambda x + F(x).
        depth: number of blocks.
        steps: number of steps, of heavy-ball momentum.
        seeds: number of nets for each factor.
        progress: show a progress bar.
    Returns:
        Result over (skip_scale, seed): `final`, the accuracy where the run ended; `first_most` and `first_full`, the
        first steps at which nine answers in ten and all are right; `onset`, the first with a loss above 1000 nats;
        `diverged`, the step whose loss is no number, where the run ends; these four NaN where there is none. Over
        (skip_scale, step, seed): `accuracy`, and `loss` in nats.
    Raises:
        LabError: no seeds, or no such net or training.
    Source:
        He et al. 2016, Identity mappings in deep residual networks, section 3.1.
    """

    def run(scale: float, seed: int) -> Training:
        return train(*_net(scale, depth, seed), steps=steps, rate=RATE, method="momentum")

    data = race("skip_scale", scales, run, steps=steps, seeds=seeds, progress=progress)
    data["diverged_reference"] = "skip_scale", [REFERENCE.get(scale, np.nan) for scale in scales]
    return outcome(
        "skip_training",
        f"{depth} blocks on three rings",
        data,
        views=[
            View("accuracy", "step", "skip_scale", "step", "accuracy", share=True),
            View("final", "skip_scale", "", "factor of the skip", "accuracy at the end", share=True),
            View("diverged", "skip_scale", "", "factor of the skip", "step of the overflow"),
        ],
        claims=_claims(data) if depth == DEPTH else [],
        # In few blocks: gradients below many of them can be too large or too small for differences to resolve.
        check=check_slope([_net(scale, 8, 0)[0] for scale in scales], _net(1.0, 8, 0)[1]),
        headline=_by_scale(data),
        settings={"depth": depth, "seeds": seeds, "steps": steps, "rate": RATE},
    )


def _net(scale: float, depth: int, seed: int) -> tuple[Net, Task]:
    task = rings(150, scale=1 / 3, head_std=0.3)
    return mlp(ScaledSkip(scale), depth=depth, branch=Perceptron(std=(0.5, 0.5)), ends=task.ends, seed=seed), task


def _claims(data: xr.Dataset) -> list[Claim]:
    """What can be said of the factors that were run, for as long as they were run."""
    steps, scales = data.sizes["step"] - 1, data.skip_scale.values.tolist()
    claims = []
    if steps >= 1200 and {0.9, 0.95, 1.0} <= set(scales):
        rows = data.sel(skip_scale=[0.9, 0.95, 1.0])
        late, *others = rows.first_most.mean("seed").values
        claims.append(
            Claim(
                "A2",
                "skips with a factor of 0.9 to 1.0 reach full accuracy on an easy task, 0.9 starting much later",
                SOURCE,
                "1.0 each; 0.9 from about step 1100",
                _by_scale(rows),
                judge(bool(rows.first_full.notnull().all() and late > 1.5 * max(others))),
            )
        )
    if steps >= 150 and 0.85 in scales:
        rows = data.sel(skip_scale=[scale for scale in scales if scale <= 0.85])
        claims.append(
            Claim(
                "A2",
                "skips with a factor of 0.85 and below leave a stack of 50 at chance",
                SOURCE,
                "0.333",
                _by_scale(rows),
                judge(bool((rows.final < 0.5).all())),
            )
        )
    if steps >= STEPS and {1.05, 1.1} <= set(scales):
        rows = data.sel(skip_scale=[1.05, 1.1])
        slow, fast = rows.onset.mean("seed").values
        claims.append(
            Claim(
                "A2",
                "skips with a factor of 1.05 and 1.1 diverge, 1.1 first",
                SOURCE,
                "loss no number from step 1554 (1.05), 218 (1.1)",
                _by_scale(rows),
                judge(bool(rows.onset.notnull().all() and fast < slow)),
            )
        )
    return claims


def _by_scale(rows: xr.Dataset) -> str:
    return "; ".join(f"{scale:g}: {_story(rows.sel(skip_scale=scale))}" for scale in rows.skip_scale.values)


def _story(row: xr.Dataset) -> str:
    """What became of the runs of one factor, in the mean over seeds."""
    if row.onset.notnull().any():
        overflow = f"overflow at {_mean(row.diverged)}" if row.diverged.notnull().any() else "no overflow yet"
        return f"loss above 1000 from step {_mean(row.onset)}, {overflow}"
    if (row.final == 1).all():
        return f"most right from step {_mean(row.first_most)}, all from {_mean(row.first_full)}"
    return f"accuracy {float(row.final.mean()):.3f}"


def _mean(steps: xr.DataArray) -> str:
    return f"{float(steps.mean()):.0f}"
