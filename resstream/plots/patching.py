"""The picture of patching: layers over positions or heads, coloured by effect; profiles; and the largest cells."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from resstream.plots.canvas import Place, choose, colour_bar, plain, readable, spread, title, title_text, whose
from resstream.plots.effect_grids import Grid, grids_of
from resstream.plots.effect_panels import Largest, LayerMap, Panel, Profile
from resstream.result import Result

_PAGE = 21.0  # inches


def draw_patching(
    place: Place,
    result: Result,
    *,
    prompt: int | None = None,
    site: str | None = None,
    metric: str | None = None,
    panel: str | None = None,
    show: str = "value",
) -> Axes:
    """Layers (bottom: the first) over positions or heads; of heads at every position, where each is strongest.

    Args:
        place: where to draw; Axes hold one panel, an empty figure one for each metric and kind of site, and after those
            of heads their largest cells.
        result: of `patch_activations` or `attribution_patching`.
        prompt: which prompt; by default the mean over all of them, with its interval.
        site: which kind of site, where several were patched; by default all of them, or, for a map on Axes, the first.
        metric: which metric, where there are several; by default all of them, or, on Axes, the first.
        panel: "grid", a map or a profile over layers; or "largest", the cells with the largest effects; by default the
            grid, but for neurons, whose thousands of columns would hide a strong one, the largest.
        show: what is written into the cells: the "value" where it is not small, or "none".
    Returns:
        The Axes of the first panel.
    """
    choose(show, ("value", "none"), "show", result.measure)
    if panel is not None:
        choose(panel, ("grid", "largest"), "panel", result.measure)
    grids = grids_of(result, prompt)
    if metric is not None:
        names = [str(name) for name in result.data.metric_name.values] if "metric_name" in result.data.dims else []
        grids = [grids[names.index(choose(metric, names, "metric", result.measure))]]
    if site is not None:
        grids = [grid.of(choose(site, grid.sites, "site", result.measure)) for grid in grids]
    panels = _panels(grids if place.ax is None else grids[:1], panel, show, alone=place.ax is not None)
    subject, which = _subject(result), whose(result, prompt, "pair")
    if len(panels) > 1:
        return _draw_all(place, result, panels, f"{subject}{which}")
    (only,) = panels
    ax = place.axes(*only.size)
    image = only.draw(ax)
    if image is not None:
        colour_bar(image, [ax], only.grid.label)
    head = f"{subject}: {only.about}{which}"
    # About as many letters fit into an inch.
    lines = [head] if len(head) < 11 * only.size[0] else [f"{subject}{which}", only.about]
    title(ax, result, *lines, only.grid.gap)
    return ax


def _panels(grids: Sequence[Grid], panel: str | None, show: str, *, alone: bool) -> list[Panel]:
    """The panels of a figure, or the one that fits alone; maps have the same colours where these mean the same."""
    panels: list[Panel] = []
    for grid in grids:
        if panel == "largest" or (panel is None and grid.part == "neuron"):
            panels.append(Largest(grid))
        elif grid.is_profile:
            panels.append(Profile(grid))
        else:
            some = [grid.of(grid.sites[0])] if alone else [grid.of(site) for site in grid.sites]
            alike = some if alone else [each for each in grids if each.label == grid.label]
            norm = spread(np.concatenate([each.values.values.ravel() for each in alike]), centred=grid.signed)
            panels += [LayerMap(each, norm, show == "value") for each in some]
            if panel is None and grid.part is not None and not alone:
                panels.append(Largest(grid))
    return panels


def _draw_all(place: Place, result: Result, panels: Sequence[Panel], head: str) -> Axes:
    """Panels side by side, in as many rows as a page's width needs."""
    widest = max(each.size[0] for each in panels)
    down = math.ceil(len(panels) / max(1, int(_PAGE / widest)))
    across = math.ceil(len(panels) / down)
    widths = [max(each.size[0] for each in panels[column::across]) for column in range(across)]
    height = max(each.size[1] for each in panels)
    figure = place.sized(sum(widths), down * height + 0.6)
    grid = figure.add_gridspec(down, across, width_ratios=widths)
    axes = [figure.add_subplot(grid[divmod(number, across)]) for number in range(len(panels))]
    images = [each.draw(ax) for each, ax in zip(panels, axes, strict=True)]
    gaps = list(dict.fromkeys(each.grid.gap for each in panels))
    for each, ax in zip(panels, axes, strict=True):
        lines = (each.about, each.grid.gap) if len(gaps) > 1 else (each.about,)
        ax.set_title("\n".join(map(readable, lines)), loc="left", fontsize="medium", **plain())
    for label in dict.fromkeys(each.grid.label for each in panels):
        mapped = [
            (image, ax)
            for image, each, ax in zip(images, panels, axes, strict=True)
            if image is not None and each.grid.label == label
        ]
        if mapped:
            colour_bar(mapped[0][0], [ax for _, ax in mapped], label)
    text, look = title_text(result, head, *(gaps if len(gaps) == 1 else ()))
    figure.suptitle(text, x=0.01, ha="left", **look)
    return axes[0]


def _subject(result: Result) -> str:
    """What was done, and to which model."""
    what, window = "Activation patching", int(result.settings.get("window", 1))
    if result.measure == "attribution_patching":
        steps, fix = int(result.settings.get("steps", 1)), result.settings.get("fix", ())
        how = [f"{steps} step{'s' * (steps > 1)}", *(f"fix {each}" for each in fix)]
        what = f"Attribution patching ({', '.join(how)})"
    return f"{what} of {result.model}{f', windows of {window} layers' if window > 1 else ''}"
