"""The picture of path lengths: how many paths there are of each length, what one carries, and what all of them do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

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
    title,
    title_text,
    variable_of,
)
from resstream.result import Result

# Beyond this, lengths cancel so much that a percentage of the sum says nothing.
LARGE_KAPPA = 100
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def draw_paths(place: Place, result: Result, *, prompt: int = 0, panel: str | None = None) -> Axes:
    """Veit's picture: four panels over path length, or one of them.

    Args:
        place: where to draw; Axes hold one panel, an empty figure all four.
        result: of `path_lengths`.
        prompt: which prompt.
        panel: "count", "path_norm", "histogram" or "share"; by default the histogram on Axes, all four on a figure.
    Returns:
        The Axes of the panel, or of the histogram among the four.
    """
    variable_of(result, "share")
    data = prompts_of(result, prompt).isel(prompt=0)
    which = f" (prompt {prompt})" if result.data.sizes["prompt"] > 1 else ""
    if panel is not None or place.ax is not None:
        name = choose(panel or "histogram", tuple(_PANELS), "panel", result.measure)
        ax = place.axes(6.6, 4.0)
        _PANELS[name](ax, data, result)
        title(ax, result, f"{_TITLES[name]}, {result.model}{which}")
        return ax
    figure = place.sized(11.5, 7.2)
    grid = figure.subplots(2, 2, sharex=True)
    for (name, draw), ax in zip(_PANELS.items(), grid.flat, strict=True):
        draw(ax, data, result)
        ax.set_title(_TITLES[name], loc="left", fontsize="medium")
    for ax in grid[0]:
        ax.set_xlabel("")
    steps = f"{_spell_power(result)} paths through {_units(result)}, from layer {result.settings.get('start', 0)} on"
    text, look = title_text(result, f"Gradient of {metric_of(result)[0]} in {result.model}{which}: {steps}")
    figure.suptitle(text, x=0.01, ha="left", **look)
    histogram: Axes = grid[1, 0]
    return histogram


def _draw_count(ax: Axes, data: xr.Dataset, result: Result) -> None:
    _frame(ax, data, result)
    ax.bar(data.path_length, data["count"], width=0.8, color=GREY, zorder=2)
    ax.set_yscale("log")
    ax.set_ylabel("number of paths")


def _draw_path_norm(ax: Axes, data: xr.Dataset, result: Result) -> None:
    _frame(ax, data, result)
    known = data.isel(path_length=np.flatnonzero((data.path_norm > 0).values))
    if not known.sizes["path_length"]:
        _say_unsampled(ax)
    else:
        floor = float(known.path_norm.min()) / 10
        low, high = known.path_norm_low.fillna(known.path_norm), known.path_norm_high.fillna(known.path_norm)
        # On a log axis an interval that reaches 0 would have no lower end.
        ax.fill_between(known.path_length, low.clip(min=floor), high, color=GREEN, alpha=0.22, linewidth=0, step="mid")
        ax.plot(known.path_length, known.path_norm, color=GREEN, marker="o", markersize=3)
        ax.set_yscale("log")
        ax.set_ylim(floor, float(high.max()) * 3)
        note = "band: 95% interval of the mean" + (
            ",\ndown to the axis where it includes 0" if (low <= 0).any() else ""
        )
        ax.text(0.015, 0.03, note, transform=ax.transAxes, fontsize=8.5, color=GREY)
    ax.set_ylabel(f"mean gradient norm of one path\n({metric_of(result)[1]} per unit of stream)", **plain())


def _draw_histogram(ax: Axes, data: xr.Dataset, result: Result) -> None:
    _frame(ax, data, result)
    ax.set_ylabel("share of all paths' gradient norm")
    if not bool(data.veit.notnull().any()):
        _say_unsampled(ax)
        return
    low, high = int(data.effective_low), int(data.effective_high)
    ax.axvspan(low - 0.5, high + 0.5, color=ORANGE, alpha=0.18, linewidth=0, zorder=0)
    ax.bar(data.path_length, data.veit, width=0.8, color=BLUE, zorder=2)
    # The bars are as uncertain as the mean norms that they are made of.
    scale = data.veit / data.path_norm
    reach = [data.veit - scale * data.path_norm_low.clip(min=0), scale * data.path_norm_high - data.veit]
    errors = [np.nan_to_num(side.values).clip(min=0) for side in reach]
    ax.errorbar(data.path_length, data.veit, errors, fmt="none", ecolor="black", elinewidth=0.8, alpha=0.6, zorder=3)
    coverage = float(result.settings.get("coverage", 0.95))
    note = f"lengths {low}–{high}: {coverage:.0%} of the norm,\n{_portion(float(data.effective_share))} of all paths"
    _note(ax, note, right=low + high <= int(data.path_length.max()))


def _draw_share(ax: Axes, data: xr.Dataset, result: Result) -> None:
    _frame(ax, data, result)
    share, kappa = data.share.values, float(data.kappa)
    ax.bar(data.path_length, share, width=0.8, color=np.where(share < 0, ORANGE, BLUE), zorder=2)
    ax.axhline(0, color="black", linewidth=0.9, zorder=3)
    if kappa <= LARGE_KAPPA:
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
        ax.set_ylabel("share of the gradient\n(signed, sums to 100%)")
    else:
        ax.set_ylabel("share of the gradient\n(signed, sums to 1)")
    heavy = data.path_length.values[np.abs(share) > 0.05 * np.abs(share).max()].mean()
    cancels = f"κ = {_figure(kappa)}" + (": lengths cancel, only their sum means much" if kappa > LARGE_KAPPA else "")
    note = f"{cancels}\nsum against autograd: off by {float(data.completeness):.0e} (relative)"
    _note(ax, note, right=bool(heavy <= int(data.path_length.max()) / 2))


_PANELS: dict[str, Callable[[Axes, xr.Dataset, Result], None]] = {
    "count": _draw_count,
    "path_norm": _draw_path_norm,
    "histogram": _draw_histogram,
    "share": _draw_share,
}
_TITLES = {
    "count": "How many paths there are",
    "path_norm": "What a single path carries",
    "histogram": "Together: number × norm (Veit et al. 2016)",
    "share": "What each length adds to the gradient, exactly",
}


def _frame(ax: Axes, data: xr.Dataset, result: Result) -> None:
    quiet_frame(ax)
    ax.set_xlim(-0.8, int(data.path_length.max()) + 0.8)
    ax.xaxis.set_major_locator(MaxNLocator(13, integer=True, steps=[1, 2, 5, 10]))
    ax.set_xlabel(f"path length ({_units(result, named=False)} passed through)")


def _note(ax: Axes, text: str, *, right: bool) -> None:
    """A remark in the corner that the bars leave free."""
    box = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 2}
    side, place = ("right", 0.985) if right else ("left", 0.015)
    ax.text(place, 0.97, text, transform=ax.transAxes, ha=side, va="top", fontsize=8.5, bbox=box, zorder=5, **plain())
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.15 * (high - low))


def _say_unsampled(ax: Axes) -> None:
    text = "no single paths were drawn (samples=0)"
    ax.set_yticks([])
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=GREY)


def _units(result: Result, *, named: bool = True) -> str:
    if result.settings.get("unit") == "layer":
        return "layers"
    return "attention and MLP writes" if named else "writes"


def _spell_power(result: Result) -> str:
    base, power, exponent = str(result.settings.get("n_paths", "all")).partition("^")
    return base + exponent.translate(_SUPERSCRIPTS) if power else base


def _portion(share: float) -> str:
    return f"{100 * share:.2g}%" if share >= 1e-5 else _figure(share)


def _figure(value: float) -> str:
    """A number in two digits, with a power of ten where it is large or small."""
    if value == 0 or 1e-3 <= value < 1e4:
        return f"{value:.3g}" if value >= 100 else f"{value:.2g}"
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits} × 10{str(int(exponent)).replace('-', '⁻').translate(_SUPERSCRIPTS)}"
