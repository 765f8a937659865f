"""Races: nets of several kinds are trained on one task for equally many steps, and their curves stand side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import xarray as xr
from jaxtyping import Float
from tqdm.auto import tqdm

from resstream.lab.experiments.parts.outcome import require_seeds
from resstream.lab.training import Training

Kind = TypeVar("Kind", float, str)


def race(
    dim: str, kinds: Sequence[Kind], run: Callable[[Kind, int], Training], *, steps: int, seeds: int, progress: bool
) -> xr.Dataset:
    """Train each kind of net with each seed.

    >>> from resstream import lab
    >>> task = lab.rings(30)
    >>> def run(rule, seed):
    ...     return lab.train(lab.mlp(rule, depth=2, ends=task.ends, seed=seed), task, steps=5)
    >>> found = race("rule", ["plain", "residual"], run, steps=5, seeds=3, progress=False)
    >>> found.loss.dims, found.loss.shape, found.final.shape
    (('rule', 'step', 'seed'), (2, 6, 3), (2, 3))

    Args:
        dim: what the kinds are.
        kinds: their names, or the number in which they differ.
        run: trains a net of a kind, with a seed.
        steps: how many steps each run makes.
        seeds: number of nets of each kind.
        progress: show a progress bar.
    Returns:
        Over (dim, step, seed): `accuracy`, and `loss` in nats, NaN after the end of a run that diverged. Over
        (dim, seed): `final` and `final_loss`, accuracy and loss where the run ended; `first_most` and `first_full`, the
        first steps at which nine answers in ten and all are right; `onset`, the first with a loss above 1000 nats;
        `diverged`, the step whose loss is no number, where the run ends; these four NaN where there is none.
    Raises:
        LabError: no seeds.
    """
    with tqdm(total=len(kinds) * len(require_seeds(seeds)), desc=f"training by {dim}", disable=not progress) as bar:

        def each(kind: Kind, seed: int) -> Training:
            bar.update()
            return run(kind, seed)

        runs = [[each(kind, seed) for seed in range(seeds)] for kind in kinds]
    whole, ends = (dim, "step", "seed"), (dim, "seed")
    return xr.Dataset(
        {
            "accuracy": (whole, np.stack([side_by_side([run.accuracy for run in row], steps) for row in runs])),
            "loss": (whole, np.stack([side_by_side([run.loss for run in row], steps) for row in runs])),
            "final": (ends, [[run.accuracy[-1] for run in row] for row in runs]),
            "final_loss": (ends, [[run.loss[-1] for run in row] for row in runs]),
            "first_most": (ends, [[_or_nan(run.first(0.9)) for run in row] for row in runs]),
            "first_full": (ends, [[_or_nan(run.first(1.0)) for run in row] for row in runs]),
            "onset": (ends, [[_or_nan(run.onset) for run in row] for row in runs]),
            "diverged": (ends, [[_or_nan(run.diverged) for run in row] for row in runs]),
        },
        coords={dim: list(kinds), "step": np.arange(steps + 1), "seed": np.arange(seeds)},
    )


def side_by_side(curves: Sequence[Float[np.ndarray, " _"]], steps: int) -> Float[np.ndarray, "step seed"]:
    """Curves of runs over so many steps, a column each; those that ended early go on as NaN.

    >>> side_by_side([np.array([3.0, 2.0, 1.0]), np.array([3.0, 9.0])], steps=2).T.tolist()
    [[3.0, 2.0, 1.0], [3.0, 9.0, nan]]
    """
    table = np.full((steps + 1, len(curves)), np.nan)
    for column, curve in enumerate(curves):
        table[: len(curve), column] = curve
    return table


def _or_nan(step: int | None) -> float:
    return float("nan") if step is None else float(step)
