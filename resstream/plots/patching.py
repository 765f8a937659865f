"""The picture of activation patching: layers over positions, coloured by how much of the gap each patch closes."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from resstream.plots.canvas import (
    BLUE,
    DIVERGING,
    GREEN,
    GREY,
    ORANGE,
    RED,
    SEQUENTIAL,
    Place,
    choose,
    heatmap,
    metric_of,
    plain,
    prompts_of,
    quiet_frame,
    row_ticks,
    spell,
    spread,
    title,
    token_ticks,
    variable_of,
    whose,
    write_cells,
)
from resstream.result import Result

_GOALS = {"denoise": "restored", "noise": "removed"}
_LINES = ((BLUE, "-"), (ORANGE, "--"), (GREEN, "-."), (RED, ":"), (GREY, "-"))


def draw_patching(
    place: Place, result: Result, *, prompt: int | None = None, site: str | None = None, show: str = "value"
) -> Axes:
    """Heatmap of the effect over layers (bottom: the first) and positions; a line if all were patched at once.

    Args:
        place: where to draw.
        result: of `patch_activations`.
        prompt: which prompt; by default the mean over all of them.
        site: which kind of site, where several were patched; by default the first (lines: all of them).
        show: what is written into the cells: the "value" where it is not small, or "none".
    """
    choose(show, ("value", "none"), "show", result.measure)
    sites = [str(each) for each in result.data.site.values]
    if site is not None:
        choose(site, sites, "site", result.measure)
    variable_of(result, "effect")
    data = prompts_of(result, prompt)
    defined = bool(data.effect.notnull().any())
    variable, label = ("effect", _effect_label(result)) if defined else ("metric", _metric_label(result))
    if "position" not in data.dims:
        return _draw_lines(place, result, data, variable, label, sites if site is None else [site], prompt)
    chosen = sites[0] if site is None else site
    cells = data[variable].sel(site=chosen).mean("prompt").transpose("layer", "position")
    rows, columns = cells.shape
    ax = place.axes(2.4 + 0.56 * columns, 1.9 + 0.22 * max(rows, 11))
    signed = variable == "effect"
    norm = spread(cells.values, centred=signed)
    cmap, grid = (DIVERGING, "#e9e9e9") if signed else (SEQUENTIAL, "white")
    image = heatmap(ax, cells.values, cmap=cmap, norm=norm, label=label, grid=grid)
    if show == "value":
        # A diverging map loses its sign in grey, so the cells that matter say it in figures.
        large = np.abs(cells.values) >= (0.15 * norm.vmax if signed else 0)  # type: ignore[operator]
        write_cells(image, np.where(large, np.vectorize(_number, otypes=[object])(cells.values), ""))
    row_ticks(ax, [str(layer) for layer in cells.layer.values])
    ax.set_ylabel("layer")
    token_ticks(ax, _pairs(data))
    ax.set_xlabel("token that was patched (clean→corrupted where they differ)")
    title(ax, result, *_title(result, data, chosen, prompt))
    return ax


def _draw_lines(
    place: Place, result: Result, data: xr.Dataset, variable: str, label: str, sites: list[str], prompt: int | None
) -> Axes:
    """Each site's effect over layers; faint lines are single prompts."""
    ax = place.axes(7.0, 3.8)
    for number, site in enumerate(sites):
        colour, style = _LINES[number % len(_LINES)]
        each = data[variable].sel(site=site).transpose("prompt", "layer")
        if each.sizes["prompt"] > 1:
            ax.plot(each.layer, each.values.T, color=colour, alpha=0.25, linewidth=0.8)
        mean = each.mean("prompt")
        ax.plot(mean.layer, mean.values, color=colour, linestyle=style, marker="o", markersize=3.5, label=site)
    if variable == "effect":
        ax.axhline(0, color="black", linewidth=0.8)
        ax.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
    quiet_frame(ax)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("layer")
    ax.set_ylabel(label, **plain())
    if len(sites) > 1:
        ax.legend(frameon=False)
    title(ax, result, *_title(result, data, f"{', '.join(sites)} at all positions", prompt))
    return ax


def _pairs(data: xr.Dataset) -> list[str]:
    """A label for each column: its token, both tokens where the runs differ, its number where prompts do."""
    labels = []
    for column, position in enumerate(data.position.values):
        here = data.isel(position=column)
        pairs = {(str(a), str(b)) for a, b in zip(here.token.values, here.corrupted_token.values, strict=True)}
        if len(pairs) > 1:
            labels.append(f"position {int(position)}")
        else:
            clean, corrupted = pairs.pop()
            labels.append(spell(clean, 24) if clean == corrupted else f"{spell(clean, 16)}→{spell(corrupted, 16)}")
    return labels


def _title(result: Result, data: xr.Dataset, what: str, prompt: int | None) -> tuple[str, str]:
    """What was patched, in which prompts, and between which two values of the metric."""
    clean, corrupted = float(data.clean.mean()), float(data.corrupted.mean())
    gap = f"clean {clean:.2f}, corrupted {corrupted:.2f} {metric_of(result)[1]}".replace("-", "−")
    return f"Activation patching of {result.model}: {what}{whose(result, prompt, 'pair')}", gap


def _effect_label(result: Result) -> str:
    direction = str(result.settings.get("direction", "denoise"))
    return f"share of the gap {_GOALS.get(direction, 'moved')} ({direction})"


def _metric_label(result: Result) -> str:
    name, units = metric_of(result)
    return f"{name} ({units});\nno effect, since both runs agree"


def _number(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.2f}".replace("0.", ".").replace("-", "−")
