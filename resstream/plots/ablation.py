"""The picture of an ablation: for each removed unit, how far the metric moved; many heads are a map."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from resstream.plots.canvas import (
    BLUE,
    DIVERGING,
    ORANGE,
    Place,
    cell_number,
    heatmap,
    metric_of,
    plain,
    prompts_of,
    quiet_frame,
    row_ticks,
    spread,
    title,
    variable_of,
    whose,
    write_cells,
)
from resstream.result import Result

_HOW = {
    "skip": "skipped",
    "zero": "set to zero",
    "mean": "replaced by its mean",
    "resample": "replaced by another prompt's",
}
_BRANCHES = {"attn": "attention branch", "mlp": "MLP branch"}
_HEAD = re.compile(r"(\d+)\.head\.(\d+)")
# As many single heads are bars with room for their names.
_BARS = 24


def draw_ablation(place: Place, result: Result, *, prompt: int | None = None) -> Axes:
    """Bars of the change that removing each unit makes, with every prompt as a point; many heads are a map over layers.

    Args:
        place: where to draw.
        result: of `ablate_layers`.
        prompt: which prompt; by default the mean over all of them.
    """
    variable_of(result, "effect")
    data = prompts_of(result, prompt)
    each = data.effect.transpose("prompt", "unit")
    unit = str(result.settings.get("unit", "unit"))
    names = [str(name) for name in each.unit.values]
    heads = [(int(found[1]), int(found[2])) for name in names if (found := _HEAD.fullmatch(name))]
    metric, units = metric_of(result)
    change = f"change of {metric}\n({units})"
    gone = _HOW.get(str(result.settings.get("how")), "removed")
    branch = _BRANCHES.get(unit, unit)
    points = ""
    if len(heads) == len(names) > _BARS:
        ax = _draw_map(place, heads, each.mean("prompt").values, change, gone)
    else:
        short = [name if unit == "head" else name.replace(f".{unit}", "") for name in names]
        ax = _draw_bars(place, each, short, change)
        what = f"layer whose {branch} was {gone}" if unit in _BRANCHES else f"{unit} that was {gone}"
        ax.set_xlabel(what)
        points = " (points: each one)" if each.sizes["prompt"] > 1 else ""
    whole = f"whole model: {float(data.base.mean()):.2f} {units}".replace("-", "−")
    title(ax, result, f"Ablation of {result.model}, {branch} by {branch}{whose(result, prompt)}{points}", whole)
    return ax


def _draw_bars(place: Place, each: xr.DataArray, names: Sequence[str], change: str) -> Axes:
    mean = each.mean("prompt").values
    ax = place.axes(2.0 + max(0.25, 0.085 * max(map(len, names))) * max(len(names), 16), 4.2)
    # The sign is the direction of the bar; the colour only repeats it.
    ax.bar(range(len(names)), mean, width=0.78, color=np.where(mean < 0, BLUE, ORANGE), zorder=2)
    if each.sizes["prompt"] > 1:
        for row in each.values:
            ax.plot(range(len(names)), row, "o", color="black", markersize=3, alpha=0.55, markeredgewidth=0, zorder=3)
    ax.axhline(0, color="black", linewidth=0.9, zorder=4)
    quiet_frame(ax)
    ax.set_xlim(-0.7, len(names) - 0.3)
    row_ticks(ax, names, along="x")
    ax.set_ylabel(change, **plain())
    return ax


def _draw_map(place: Place, heads: Sequence[tuple[int, int]], effects: np.ndarray, change: str, gone: str) -> Axes:
    """Layers over heads; grey where a head was not removed."""
    layers, numbers = (sorted({head[axis] for head in heads}) for axis in (0, 1))
    values = np.full((len(layers), len(numbers)), np.nan)
    for (layer, number), effect in zip(heads, effects, strict=True):
        values[layers.index(layer), numbers.index(number)] = effect
    ax = place.axes(2.6 + 0.42 * max(len(numbers), 9), 1.9 + 0.22 * max(len(layers), 11))
    norm = spread(values, centred=True)
    image = heatmap(ax, values, cmap=DIVERGING, norm=norm, label=change, grid="#e9e9e9")
    # A diverging map loses its sign in grey, so the cells that matter say it in figures.
    large = np.abs(values) >= 0.15 * norm.vmax  # type: ignore[operator]
    write_cells(image, np.where(large, np.vectorize(cell_number, otypes=[object])(values), ""))
    row_ticks(ax, [str(layer) for layer in layers])
    row_ticks(ax, [str(number) for number in numbers], along="x")
    ax.set_xlabel(f"head that was {gone}")
    ax.set_ylabel("layer")
    return ax
