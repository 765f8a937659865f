"""Effects: what patches did to a metric, between the two baselines that say what nothing and everything would do."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float

from resstream.measure.intervals import LEVEL
from resstream.measure.labels import names_of
from resstream.measure.metrics import Metric
from resstream.measure.patches.cells import Cells
from resstream.measure.patches.pairs import Direction, Pairs

_SIGN = {
    "denoise": "effect = (metric - corrupted) / (clean - corrupted): 1 restores the clean value, 0 does nothing",
    "noise": "effect = (metric - clean) / (corrupted - clean): 1 removes the clean value, 0 does nothing",
}


_CELLS_AT_ONCE = 4096


@dataclass(frozen=True)
class EffectGrid:
    """A labelled grid of effects, and its strongest cell in words."""

    grid: xr.Dataset
    headline: str


def effect_grid(
    cells: Cells,
    pairs: Pairs,
    metrics: Sequence[Metric],
    grid: Float[np.ndarray, "metric prompt site layer part position"],
    ends: Float[np.ndarray, "metric side prompt"],
    direction: Direction,
    *,
    several: bool,
) -> EffectGrid:
    """Label a grid, and put it between its baselines.

    Args:
        cells: what was patched.
        pairs: in which prompts.
        metrics: what was measured.
        grid: the metric of each cell, NaN where a prompt has no such cell.
        ends: the metric of the clean and of the corrupted runs.
        direction: which of them is patched.
        several: whether the metrics are an axis of the result, or just the one.
    """
    labelled = [
        effects(cells.squeeze(each), clean, corrupted, direction, cells.dims)
        for each, (clean, corrupted) in zip(grid, ends, strict=True)
    ]
    words = headline(labelled[0].assign_coords(cells.coords(pairs)), direction, metrics[0].units)
    data = labelled[0]
    if several:
        data = xr.concat(
            labelled, xr.DataArray([each.name for each in metrics], dims="metric_name", name="metric_name")
        )
        data = data.transpose("prompt", "metric_name", ...)
    return EffectGrid(data.assign_coords(cells.coords(pairs)), words)


def settings_of(metrics: Sequence[Metric], direction: Direction, positions: Any) -> dict[str, Any]:
    """What a result says of how it was made, its sign and normalisation among it."""
    names, units = ([getattr(each, word) for each in metrics] for word in ("name", "units"))
    one = len(metrics) == 1
    return {
        "direction": direction,
        "metric": names[0] if one else names,
        "units": units[0] if one else units,
        "positions": names_of(positions if isinstance(positions, (list, tuple, int)) else str(positions)),
        "sign": _SIGN[direction],
    }


def effects(
    grid: Float[np.ndarray, " prompt *cells"],
    clean: Float[np.ndarray, " prompt"],
    corrupted: Float[np.ndarray, " prompt"],
    direction: Direction,
    dims: Sequence[str],
) -> xr.Dataset:
    """A grid in the metric's units, and normalised for each prompt and for their mean.

    The mean effect is the mean change over the mean gap between the baselines, so that a pair with hardly any gap
    cannot outweigh the others; its interval comes from drawing as many pairs again and again.

    Args:
        grid: the metric of each cell, NaN where a prompt has no such cell.
        clean, corrupted: the metric of the two runs.
        direction: which of them is patched.
        dims: names of the cells' axes.
    Returns:
        `metric` and `effect` by prompt, `clean`, `corrupted`, `mean_effect`, and, where there are several prompts,
        `effect_low` and `effect_high`, the ends of its 95% interval.
    """
    start, end = (corrupted, clean) if direction == "denoise" else (clean, corrupted)
    gap = end - start
    if (gap == 0).any():
        warnings.warn(
            f"clean and corrupted runs have the same metric for prompts {np.flatnonzero(gap == 0).tolist()}: "
            "there is nothing to restore, so their effect is NaN",
            stacklevel=4,
        )
    spread = (slice(None), *[None] * (grid.ndim - 1))
    change = grid - start[spread]
    with np.errstate(invalid="ignore", divide="ignore"):
        each = np.where(gap[spread] == 0, np.nan, change / gap[spread])
    summary = _mean_effect(change, gap)
    names = ("mean_effect", "effect_low", "effect_high")
    return xr.Dataset(
        {
            "metric": (("prompt", *dims), grid),
            "effect": (("prompt", *dims), each),
            "clean": ("prompt", clean),
            "corrupted": ("prompt", corrupted),
            **{name: (tuple(dims), values) for name, values in zip(names, summary, strict=False)},
        }
    )


def _mean_effect(change: np.ndarray, gap: np.ndarray, draws: int = 1000, seed: int = 0) -> list[np.ndarray]:
    """The mean change over the mean gap, and, where there are several prompts, the ends of its interval."""
    present = ~np.isnan(change)
    flat = np.where(present, change, 0.0).reshape(len(gap), -1)
    gaps = present.reshape(len(gap), -1) * gap[:, None]

    def ratio(weights: np.ndarray, some: slice) -> np.ndarray:
        with np.errstate(invalid="ignore", divide="ignore"):
            below = weights @ gaps[:, some]
            return np.where(below == 0, np.nan, weights @ flat[:, some] / below)

    mean = ratio(np.ones((1, len(gap))), slice(None))[0].reshape(change.shape[1:])
    if len(gap) < 2:
        return [mean]
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(len(gap), np.full(len(gap), 1 / len(gap)), size=draws).astype(float)
    ends = np.empty((2, flat.shape[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a cell that no draw has stays NaN
        for start in range(0, flat.shape[1], _CELLS_AT_ONCE):
            some = slice(start, start + _CELLS_AT_ONCE)
            ends[:, some] = np.nanquantile(ratio(counts, some), [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return [mean, *(each.reshape(change.shape[1:]) for each in ends)]


def headline(data: xr.Dataset, direction: str, units: str) -> str:
    """The strongest cell of the mean over prompts, in one line."""
    mean = data.mean_effect
    goal = "restores" if direction == "denoise" else "removes"
    if not bool(mean.notnull().any()):
        return "clean and corrupted runs have the same metric, so no effect is defined"
    best = mean.isel(mean.argmax(...))
    place = _place(best)
    where = ""
    if "position" in best.coords:
        token = str(data.token.sel(position=best.position).values[0])
        where = f" at position {best.position.values!s} ({token!r})"
    about = ""
    if "effect_low" in data:
        ends = [float(data[name].sel({dim: best[dim] for dim in mean.dims})) for name in ("effect_low", "effect_high")]
        about = f" ({ends[0]:.0%} to {ends[1]:.0%}, {data.sizes['prompt']} pairs)"
    gap = f"{float(data.clean.mean()):.2f} against {float(data.corrupted.mean()):.2f} {units}"
    return f"{direction}: {place}{where} {goal} {float(best):.0%}{about} of the gap ({gap})"


def _place(cell: xr.DataArray) -> str:
    """Where a cell is: a site, or the two ends of a path."""
    if "sender" in cell.coords:
        return f"{cell.sender.values!s} to {cell.receiver.values!s}"
    part = "".join(f".{int(cell[part])}" for part in ("head", "neuron") if part in cell.coords)
    return f"{int(cell.layer)}.{cell.site.values!s}{part}"
