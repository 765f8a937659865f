"""The picture of a layer ensemble: what each unit is worth, and how much is left with so many of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from resstream.plots.canvas import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    Place,
    choose,
    metric_of,
    plain,
    prompts_of,
    quiet_frame,
    row_ticks,
    title,
    title_text,
    variable_of,
    whose,
)
from resstream.result import Result

_HOW = {"skip": "skipped", "mean": "replaced by their means", "resample": "replaced by another prompt's"}


def draw_ensemble(place: Place, result: Result, *, prompt: int | None = None, panel: str | None = None) -> Axes:
    """Shapley values, level means and, where every subset was run, order totals; or one of these.

    Args:
        place: where to draw; Axes hold one panel, an empty figure all that the result has.
        result: of `layer_ensemble`.
        prompt: which prompt; by default the mean over all of them.
        panel: "shapley", "level_mean" or "order_total"; by default Shapley values on Axes, all on a figure.
    Returns:
        The Axes of the panel, or of the Shapley values among them.
    """
    variable_of(result, "shapley")
    data = prompts_of(result, prompt)
    width = 2.0 + 0.27 * max(data.sizes["unit"], 16)
    if panel is not None or place.ax is not None:
        name = choose(panel or "shapley", tuple(_PANELS), "panel", result.measure)
        ax = place.axes(width if name == "shapley" else 6.6, 4.0)
        _PANELS[name](ax, data, result)
        title(ax, result, f"{_TITLES[name]}, {result.model}{whose(result, prompt)}", metric_of(result)[0])
        return ax
    figure = place.sized(max(width, 9.5), 7.2)
    below = ["level_mean", "order_total"] if result.settings.get("exact") else ["level_mean"]
    rows: list[Any] = [["shapley"] * len(below), below]
    axes = figure.subplot_mosaic(rows)
    for name, ax in axes.items():
        _PANELS[name](ax, data, result)
        ax.set_title(_TITLES[name], loc="left", fontsize="medium")
    runs = f"{result.model} as an ensemble: {_runs(result)}{whose(result, prompt)}"
    text, look = title_text(result, runs, metric_of(result)[0])
    figure.suptitle(text, x=0.01, ha="left", **look)
    shapley: Axes = axes["shapley"]
    return shapley


def _draw_shapley(ax: Axes, data: xr.Dataset, result: Result) -> None:
    mean, half = _mean_and_half(data, "shapley")
    names = [str(name) for name in data.unit.values]
    # The sign is the direction of the bar; the colour only repeats it.
    ax.bar(range(len(names)), mean, width=0.78, color=np.where(mean < 0, BLUE, ORANGE), zorder=2)
    if _sampled(half):
        ax.errorbar(range(len(names)), mean, half, fmt="none", ecolor="black", elinewidth=1.0, alpha=0.7, zorder=3)
        _note(ax, "lines: 95% interval")
    elif data.sizes["prompt"] > 1:
        for row in data.shapley.transpose("prompt", "unit").values:
            ax.plot(range(len(names)), row, "o", color="black", markersize=3, alpha=0.55, markeredgewidth=0, zorder=3)
        _note(ax, "points: each prompt")
    ax.axhline(0, color="black", linewidth=0.9, zorder=4)
    quiet_frame(ax)
    ax.set_xlim(-0.7, len(names) - 0.3)
    row_ticks(ax, names, along="x")
    ax.set_xlabel("layer" if result.settings.get("unit") == "layer" else "write")
    ax.set_ylabel(f"Shapley value ({metric_of(result)[1]})", **plain())


def _draw_level_mean(ax: Axes, data: xr.Dataset, result: Result) -> None:
    mean, half = _mean_and_half(data, "level_mean")
    order = data.order.values
    ax.plot(order[[0, -1]], mean[[0, -1]], color=GREY, linestyle=":", label="if units just added up")
    ax.plot(order, mean, color=GREEN, marker="o", markersize=3.5, label="mean over all sets of as many")
    if _sampled(half):
        ax.fill_between(order, mean - half, mean + half, color=GREEN, alpha=0.22, linewidth=0, label="95% interval")
    _frame(ax, data)
    ax.set_xlabel(f"number of {_units(result)} kept")
    ax.set_ylabel(f"metric ({metric_of(result)[1]})", **plain())
    ax.legend(frameon=False, fontsize=8.5)


def _draw_order_total(ax: Axes, data: xr.Dataset, result: Result) -> None:
    total = data.order_total.mean("prompt").values
    known = data.isel(order=np.flatnonzero(np.isfinite(total)))
    total = total[np.isfinite(total)]
    ax.bar(known.order, total, width=0.8, color=np.where(total < 0, BLUE, ORANGE), zorder=2)
    ax.axhline(0, color="black", linewidth=0.9, zorder=3)
    _frame(ax, known)
    ax.set_xlabel(f"order: {_units(result)} that act together")
    ax.set_ylabel(f"sum of Möbius terms ({metric_of(result)[1]})", **plain())
    if len(total) == data.sizes["order"]:
        _note(ax, f"they sum to {_figure(total.sum())},\ntheir sizes to {_figure(np.abs(total).sum())}")


_PANELS: dict[str, Callable[[Axes, xr.Dataset, Result], None]] = {
    "shapley": _draw_shapley,
    "level_mean": _draw_level_mean,
    "order_total": _draw_order_total,
}
_TITLES = {
    "shapley": "What each unit adds to a set of others, on average",
    "level_mean": "What is left with so many of them",
    "order_total": "What sets of each size add beyond their parts",
}


def _mean_and_half(data: xr.Dataset, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The mean over prompts, and half the width of its interval; each prompt was sampled on its own."""
    half = (data[f"{name}_high"] - data[f"{name}_low"]) / 2
    return data[name].mean("prompt").values, np.sqrt((half**2).sum("prompt", skipna=False).values) / data.sizes[
        "prompt"
    ]


def _sampled(half: np.ndarray) -> bool:
    """Whether there are intervals to show: exact values have none, and too few samples give none."""
    return bool(np.nan_to_num(half).any())


def _frame(ax: Axes, data: xr.Dataset) -> None:
    quiet_frame(ax)
    ax.set_xlim(-0.8, int(data.order.max()) + 0.8)
    ax.xaxis.set_major_locator(MaxNLocator(13, integer=True, steps=[1, 2, 5, 10]))


def _note(ax: Axes, text: str) -> None:
    """A remark above what is drawn."""
    ax.text(0.985, 0.97, text, transform=ax.transAxes, ha="right", va="top", fontsize=8.5, color=GREY, zorder=5)
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.18 * (high - low))


def _figure(value: float) -> str:
    return (f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}").replace("-", "−")


def _units(result: Result) -> str:
    return f"{result.settings.get('unit', 'unit')}s"


def _runs(result: Result) -> str:
    count = result.data.sizes["unit"]
    gone = _HOW.get(str(result.settings.get("how")), "removed")
    if result.settings.get("exact"):
        return f"every subset of {count} {_units(result)}, the others {gone}"
    return f"{count} {_units(result)} joining in {result.settings.get('samples_done')} random orders, the others {gone}"
