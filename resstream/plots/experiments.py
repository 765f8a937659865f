"""The picture of a lab experiment: the mean over seeds as a line, its interval as a band, references as crosses."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from resstream.errors import ResultError
from resstream.plots.canvas import BLUE, Place, choose, plain, quiet_frame, readable, title, variable_of
from resstream.result import Result


def draw_experiment(place: Place, result: Result, *, show: str | None = None) -> Axes:
    """One view of an experiment.

    Args:
        place: where to draw.
        result: of an experiment of the lab.
        show: the variable to show; by default the main one.
    """
    views = {str(view["y"]): view for view in result.settings.get("views", ())}
    if not views:
        raise ResultError(f"{result.measure} says nothing about how it is drawn; give a result as the lab returned it")
    view = views[choose(next(iter(views)) if show is None else show, tuple(views), "show", result.measure)]
    values = variable_of(result, view["y"])
    ax = place.axes(6.6, 4.2)
    if result.data[view["x"]].dtype.kind in "OU":
        _bars(ax, result.data, values, view)
    else:
        _lines(ax, result.data, values, view)
    for axis in view["log"]:
        (ax.set_xscale if axis == "x" else ax.set_yscale)("log")
    quiet_frame(ax)
    ax.set_xlabel(readable(view["x_label"] or view["x"]), **plain())
    ax.set_ylabel(readable(view["y_label"] or view["y"]), **plain())
    lines = len(ax.get_legend_handles_labels()[0])
    if lines:
        # Many lines leave no room inside for their names.
        beside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if lines > 4 else {}
        ax.legend(frameon=False, fontsize=8.5, **beside)
    title(ax, result, f"{result.measure.removeprefix('lab.').replace('_', ' ')}: {result.model}")
    return ax


def _series(values: xr.DataArray, view: dict[str, Any]) -> list[tuple[str, dict[str, Any], str]]:
    """Each line of a picture: its label, how to select it, and its colour."""
    if not view["series"]:
        return [("", {}, BLUE)]
    names = values[view["series"]].values
    shades = mpl.colormaps["viridis"](np.linspace(0, 0.88, len(names)))
    return [
        (_label(name), {view["series"]: number}, mpl.colors.to_hex(shade))
        for number, (name, shade) in enumerate(zip(names, shades, strict=True))
    ]


def _label(name: Any) -> str:
    return f"{name:g}" if isinstance(name, (float, np.floating)) else str(name)


def _lines(ax: Axes, data: xr.Dataset, values: xr.DataArray, view: dict[str, Any]) -> None:
    x, name = data[view["x"]].values, view["y"]
    for label, at, colour in _series(values, view):
        mean = data.get(f"{name}_mean", values).isel(at)
        ax.plot(
            x, mean, color=colour, label=label or None, linewidth=1.6, marker="o", markersize=3 if len(x) < 30 else 0
        )
        if f"{name}_low" in data:
            low, high = (data[f"{name}_{end}"].isel(at) for end in ("low", "high"))
            ax.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
        if f"{name}_reference" in data:
            reference = data[f"{name}_reference"]
            ax.plot(x, reference.isel({k: v for k, v in at.items() if k in reference.dims}), "x", color=colour)


def _bars(ax: Axes, data: xr.Dataset, values: xr.DataArray, view: dict[str, Any]) -> None:
    """Groups of bars, where what stands along the picture has names and no order."""
    names, name = [str(each) for each in data[view["x"]].values], view["y"]
    lines = _series(values, view)
    width = 0.8 / len(lines)
    for number, (label, at, colour) in enumerate(lines):
        places = np.arange(len(names)) + (number - (len(lines) - 1) / 2) * width
        mean = data.get(f"{name}_mean", values).isel(at)
        ax.bar(places, mean, width, color=colour, label=label or None)
        if f"{name}_low" in data:
            reach = [abs(data[f"{name}_{end}"].isel(at) - mean) for end in ("low", "high")]
            ax.errorbar(places, mean, yerr=reach, fmt="none", color="black", linewidth=0.9, capsize=2)
        if f"{name}_reference" in data:
            reference = data[f"{name}_reference"]
            ax.plot(places, reference.isel({k: v for k, v in at.items() if k in reference.dims}), "x", color="black")
    ax.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8.5, **plain())
