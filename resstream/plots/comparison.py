"""The picture of a comparison: each cell's estimate over its exact value, and the line on which they agree."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from resstream.plots.canvas import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    Place,
    choose,
    plain,
    prompts_of,
    readable,
    spell,
    title,
    variable_of,
    whose,
)
from resstream.result import Result

_LOOKS = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"), (RED, "D"), (GREY, "v"))


def draw_comparison(place: Place, result: Result, *, prompt: int | None = None, metric: str | None = None) -> Axes:
    """Scatter of estimated over exact changes, a colour for each kind of site, and the line on which the two are equal.

    Args:
        place: where to draw.
        result: of `compare`.
        prompt: which prompt; by default the cells of all of them.
        metric: which metric, where there are several; by default the first.
    """
    variable_of(result, "exact")
    data = prompts_of(result, prompt)
    names = [str(name) for name in data.metric_name.values] if "metric_name" in data.dims else []
    if metric is not None:
        choose(metric, names, "metric", result.measure)
    number = names.index(metric) if metric is not None else 0
    if names:
        data = data.isel(metric_name=number)
    ax = place.axes(6.2, 5.8)
    kinds = [str(kind) for kind in data.site.values]
    for at, kind in enumerate(kinds):
        colour, marker = _LOOKS[at % len(_LOOKS)]
        cells = data.sel(site=kind)
        ax.scatter(
            cells.exact.values.ravel(),
            cells.estimated.values.ravel(),
            s=16,
            color=colour,
            marker=marker,
            alpha=0.6,
            linewidths=0,
            label=kind,
            zorder=3,
        )
    ax.axline((0, 0), slope=1, color="black", linewidth=0.9, zorder=2, label="equal")
    ax.axhline(0, color=GREY, linewidth=0.6, linestyle=":", zorder=1)
    ax.axvline(0, color=GREY, linewidth=0.6, linestyle=":", zorder=1)
    ax.spines[["top", "right"]].set_visible(False)
    _mark_worst(ax, data)
    units = _one(result, "units", number)
    what = "size of the change" if result.settings.get("sizes") else "change"
    ax.set_xlabel(f"exact: {what} ({units})", **plain())
    ax.set_ylabel(f"estimated: {what} ({units})", **plain())
    ax.legend(frameon=False, fontsize=8.5)
    pair = f"{result.settings.get('estimated', 'estimated')} against {result.settings.get('exact', 'exact')}"
    of = f"{_one(result, 'metric', number)}{whose(result, prompt, 'pair')}".replace(", mean of", ", cells of")
    numbers = f"Pearson {float(data.pearson):.3f}, Spearman {float(data.spearman):.3f}, slope {float(data.slope):.3f}"
    title(ax, result, f"{result.model}: {pair}", of, f"{numbers} (all cells)".replace("-", "−"))
    return ax


def _one(result: Result, name: str, number: int) -> str:
    """A setting of one metric, where there may be several."""
    value = result.settings.get(name, name)
    return readable(str(value[number] if isinstance(value, list) else value).replace(" - ", " − "))


def _mark_worst(ax: Axes, data: xr.Dataset) -> None:
    """Name the cell that agrees least."""
    miss = np.abs(data.miss)
    worst = data.isel(miss.argmax(...))
    if not float(worst.miss):
        return
    name = f"{int(worst.layer)}.{worst.site.values!s}"
    name += "".join(f".{int(worst[part])}" for part in ("head", "neuron") if part in worst.coords)
    if "position" in worst.coords:
        name += (
            f" at {spell(str(worst.token.values), 16)}" if "token" in worst.coords else f" at {worst.position.values}"
        )
    right = float(worst.exact) > float(data.exact.mean())
    ax.annotate(
        name,
        (float(worst.exact), float(worst.estimated)),
        xytext=(-6 if right else 6, 0),
        textcoords="offset points",
        ha="right" if right else "left",
        va="center",
        fontsize=8.5,
        **plain(),
    )
