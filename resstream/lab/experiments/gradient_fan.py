"""Skips with a factor: how the gradient fades or grows through an untrained stack."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr
from tqdm.auto import tqdm

from resstream.lab.branches import Perceptron
from resstream.lab.experiments.parts.claims import Claim, judge, within
from resstream.lab.experiments.parts.outcome import View, outcome, require_seeds, spelled
from resstream.lab.experiments.parts.slopes import check_slope, gradients_by_boundary
from resstream.lab.nets import Net, mlp
from resstream.lab.rules import ScaledSkip
from resstream.lab.tasks import Task, spirals
from resstream.result import Result

# What is said of 50 blocks, by the factor of their skips.
REFERENCE = {0.8: "1.3e-4", 1.0: "3.6", 1.1: "204"}
DEPTH = 50


def gradient_fan(
    *,
    scales: Sequence[float] = (0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1),
    depth: int = DEPTH,
    seeds: int = 10,
    progress: bool = False,
) -> Result:
    """Measure how much of the gradient reaches the input of untrained stacks whose skips have a factor.

    >>> from resstream import lab
    >>> fan = lab.experiments.gradient_fan(scales=(0.8, 1.0), seeds=2)
    >>> fan.data.ratio.dims, fan.check.passed
    (('skip_scale', 'seed'), True)

    Args:
        scales: factors lambda of x <- lambda x + F(x).
        depth: number of blocks.
        seeds: number of nets for each factor.
        progress: show a progress bar.
    Returns:
        Result with `ratio` (skip_scale, seed), the norm of the loss's gradient at the input over that at the last
        state, `ratio_mean`, `ratio_low`, `ratio_high` (geometric), `ratio_pure`, which is lambda^depth, and
        `gradient` (skip_scale, boundary, seed), the same for each boundary.
    Raises:
        LabError: no seeds, or no such net.
    Source:
        He et al. 2016, Identity mappings in deep residual networks, section 3.
    """
    found = []
    with tqdm(total=len(scales) * len(require_seeds(seeds)), desc="gradient fan", disable=not progress) as bar:
        for scale in scales:
            rows = []
            for seed in range(seeds):
                net, task = _net(scale, depth, seed)
                norms = np.array([float(each.norm()) for each in gradients_by_boundary(net, task)])
                rows.append(norms / norms[-1])
                bar.update()
            found.append(rows)
    gradient = np.array(found).transpose(0, 2, 1)
    told = [scale for scale in scales if depth == DEPTH and scale in REFERENCE]
    reference = [float(REFERENCE[scale]) if scale in told else np.nan for scale in scales]
    data = xr.Dataset(
        {
            "ratio": (("skip_scale", "seed"), gradient[:, 0]),
            "gradient": (("skip_scale", "boundary", "seed"), gradient),
            "ratio_pure": ("skip_scale", np.array(scales) ** depth),
            "ratio_reference": ("skip_scale", reference),
        },
        coords={"skip_scale": list(scales), "seed": np.arange(seeds), "boundary": np.arange(depth + 1)},
    )
    claims = [_claim(scale, data.ratio.sel(skip_scale=scale).values) for scale in told]
    means = np.exp(np.log(gradient[:, 0]).mean(-1))
    spoken = ", ".join(f"{mean:.3g} at {scale}" for mean, scale in zip(means, scales, strict=True))
    return outcome(
        "gradient_fan",
        f"{depth} untrained blocks",
        data,
        views=[
            View("ratio", "skip_scale", "", "factor of the skip", "gradient at the input / at the end", "y"),
            View("gradient", "boundary", "skip_scale", "boundary", "gradient / gradient at the end", "y"),
        ],
        claims=claims,
        check=check_slope([_net(scale, depth, 0)[0] for scale in scales], _net(1.0, depth, 0)[1]),
        headline=f"gradient at the input over that at the end: {spoken}",
        settings={"depth": depth, "seeds": seeds},
    )


def _net(scale: float, depth: int, seed: int) -> tuple[Net, Task]:
    task = spirals(300, scale=0.15)
    branch = Perceptron(std=(0.5, 0.5))
    return mlp(ScaledSkip(scale), depth=depth, branch=branch, ends=task.ends, seed=seed), task


def _claim(scale: float, ratios: np.ndarray) -> Claim:
    mean = float(np.exp(np.log(ratios).mean()))
    return Claim(
        "A1",
        f"50 blocks whose skips have the factor {scale} pass this share of the gradient to their input",
        "He et al. 2016, Identity mappings, section 3",
        REFERENCE[scale],
        spelled(ratios, scale="log"),
        judge(within(mean, float(REFERENCE[scale]), 2.0)),
    )
