"""The picture of path lengths: how many paths there are of each length, what one carries, and what all of them do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.ticker import MaxNLocator, PercentFormatter

from resstream.errors import ResultError
from resstream.plots.canvas import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    SEQUENTIAL,
    Place,
    choose,
    heatmap,
    metric_of,
    plain,
    prompts_of,
    quiet_frame,
    title,
    title_text,
    variable_of,
    whose,
)
from resstream.result import Result

# Beyond this, lengths cancel so much that a percentage of the sum says nothing.
LARGE_KAPPA = 100
# Hops whose paths carry less than this part of the most are not shown.
_FAINTEST = 1e-4
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def draw_paths(place: Place, result: Result, *, prompt: int | None = None, panel: str | None = None) -> Axes:
    """Veit's picture: four panels over path length, or one of them; or where the paths start, or what they hop through.

    Args:
        place: where to draw; Axes hold one panel, an empty figure four.
        result: of `path_lengths`.
        prompt: which prompt; by default the mean over all of them.
        panel: "count", "path_norm", "histogram" or "share", by default the histogram on Axes, these four on a figure;
            "starts", how much cancels from each start layer on; or "branches", by hops through attention and MLPs.
    Returns:
        The Axes of the panel, or of the histogram among the four.
    """
    variable_of(result, "share")
    data = prompts_of(result, prompt)
    which = whose(result, prompt)
    if panel is not None or place.ax is not None:
        name = choose(panel or "histogram", (*_PANELS, *_OTHERS), "panel", result.measure)
        if name == "branches":
            _require_branches(result)
        ax = place.axes(6.6, 5.4 if name == "branches" else 4.0)
        (_PANELS | _OTHERS)[name](ax, data, result)
        title(ax, result, f"{_TITLES[name]}, {result.model}{which}", *carried_of(result))
        return ax
    figure = place.sized(11.5, 7.2)
    grid = figure.subplots(2, 2, sharex=True)
    for (name, draw), ax in zip(_PANELS.items(), grid.flat, strict=True):
        draw(ax, data, result)
        ax.set_title(_TITLES[name], loc="left", fontsize="medium")
    for ax in grid[0]:
        ax.set_xlabel("")
    steps = f"{_spell_power(result)} paths through {_units(result)}, from layer {result.settings.get('start', 0)} on"
    of = f"Gradient of {metric_of(result)[0]} in {result.model}{which}: {steps}"
    text, look = title_text(result, of, *carried_of(result))
    figure.suptitle(text, x=0.01, ha="left", **look)
    histogram: Axes = grid[1, 0]
    return histogram


def spell_number(value: float) -> str:
    """A number in two digits, with a power of ten where it is large or small.

    >>> spell_number(19034.0), spell_number(2.71)
    ('1.9 × 10⁴', '2.7')
    """
    if value == 0 or 1e-3 <= value < 1e3:
        return f"{value:.3g}" if value >= 100 else f"{value:.2g}"
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits} × 10{str(int(exponent)).replace('-', '⁻').translate(_SUPERSCRIPTS)}"


def carried_of(result: Result) -> tuple[str, ...]:
    """The line of a title that says that the trunk itself has factors; none where it has none."""
    return (result.settings["trunk"],) if "trunk" in result.settings else ()


def _draw_count(ax: Axes, data: xr.Dataset, result: Result) -> None:
    _frame(ax, data, result)
    ax.bar(data.path_length, data["count"], width=0.8, color=GREY, zorder=2)
    ax.set_yscale("log")
    ax.set_ylabel("number of paths")


def _draw_path_norm(ax: Axes, data: xr.Dataset, result: Result) -> None:
    """The mean norm of single paths, and the root of their mean square, which the few largest ones decide."""
    _frame(ax, data, result)
    ax.set_ylabel(f"gradient norm of one path\n({metric_of(result)[1]} per unit of stream)", **plain())
    each = np.sqrt(data["count"])
    curves = {
        "mean, of a sample": (GREEN, "-", [data[f"path_norm{end}"] for end in _ENDS]),
        "root mean square, by random signs": (BLUE, "--", [data[f"rms{end}"] / each for end in _ENDS]),
    }
    drawn: list[np.ndarray] = []
    before = len(ax.collections)
    for label, (colour, style, interval) in curves.items():
        if bool((interval[0] > 0).any()):
            drawn += _curve(ax, interval, colour, style, label)
    if not drawn:
        _say_unsampled(ax, "no single paths were drawn (samples=0),\nand no signs (signs=0)")
        return
    reach = np.concatenate([values[values > 0] for values in drawn])
    ax.set_yscale("log")
    ax.set_ylim(reach.min() / 3, reach.max() * 3)
    ax.legend(frameon=False, fontsize=8.5, loc="upper right")
    banded = len(ax.collections) > before
    note = "bands: 95% intervals" if banded else "thin lines: each prompt" if data.sizes["prompt"] > 1 else ""
    ax.text(0.015, 0.03, note, transform=ax.transAxes, fontsize=8.5, color=GREY)


def _curve(ax: Axes, interval: list[xr.DataArray], colour: str, style: str, label: str) -> list[np.ndarray]:
    """One line with its band, or the mean of several prompts with a thin line for each; all values that were drawn."""
    values, low, high = interval
    lengths, mean = values.path_length, values.mean("prompt")
    ax.plot(lengths, mean, color=colour, linestyle=style, marker="o", markersize=3, label=label)
    if values.sizes["prompt"] > 1:
        ax.plot(lengths, values.transpose("path_length", "prompt"), color=colour, alpha=0.3, linewidth=0.7)
        return [values.values]
    # A single sample leaves everything open, from 0 to infinity.
    sure = (low > 0) & np.isfinite(high)
    if bool(sure.any()):
        below, above = (end.where(sure).isel(prompt=0).values for end in (low, high))
        ax.fill_between(lengths, below, above, color=colour, alpha=0.22, linewidth=0)
        return [mean.values, below, above]
    return [mean.values]


def _draw_histogram(ax: Axes, data: xr.Dataset, result: Result) -> None:
    _frame(ax, data, result)
    ax.set_ylabel("share of all paths' gradient norm")
    if not bool(data.veit.notnull().any()):
        _say_unsampled(ax, "no single paths were drawn (samples=0)")
        return
    # What holds so much in every prompt is the range around all of theirs.
    low, high = int(data.effective_low.min()), int(data.effective_high.max())
    ax.axvspan(low - 0.5, high + 0.5, color=ORANGE, alpha=0.18, linewidth=0, zorder=0)
    if data.sizes["prompt"] > 1:
        mean = (data.veit_mean, data.veit_low, data.veit_high)
    else:
        # The bars are as uncertain as the mean norms that they are made of.
        alone = data.isel(prompt=0)
        scale = alone.veit / alone.path_norm
        mean = (alone.veit, scale * alone.path_norm_low, scale * alone.path_norm_high)
    ax.bar(data.path_length, mean[0], width=0.8, color=BLUE, zorder=2)
    _errors(ax, data, *mean)
    # An interval that is much longer than the bars leaves the picture, rather than press them flat.
    ax.set_ylim(0, min(ax.get_ylim()[1], 3 * float(mean[0].max())))
    coverage = float(result.settings.get("coverage", 0.95))
    held = float(data["count"][low : high + 1].sum() / data["count"].sum())
    several = " or more, in each prompt" if data.sizes["prompt"] > 1 else ""
    note = f"lengths {low}–{high}: {coverage:.0%} of the norm{several},\n{_portion(held)} of all paths"
    _note(ax, note, right=low + high <= int(data.path_length.max()))


def _draw_share(ax: Axes, data: xr.Dataset, result: Result) -> None:
    _frame(ax, data, result)
    several, kappa = data.sizes["prompt"] > 1, float(data.kappa.max())
    share = (data.share_mean if several else data.share.isel(prompt=0)).values
    ax.bar(data.path_length, share, width=0.8, color=np.where(share < 0, ORANGE, BLUE), zorder=2)
    if several:
        _errors(ax, data, data.share_mean, data.share_low, data.share_high)
    ax.axhline(0, color="black", linewidth=0.9, zorder=3)
    if kappa <= LARGE_KAPPA:
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
        ax.set_ylabel("share of the gradient\n(signed, sums to 100%)")
    else:
        ax.set_ylabel("share of the gradient\n(signed, sums to 1)")
    heavy = data.path_length.values[np.abs(share) > 0.05 * np.abs(share).max()].mean()
    spelled = f"{spell_number(float(data.kappa.min()))} to {spell_number(kappa)}" if several else spell_number(kappa)
    cancels = f"κ = {spelled}" + (": lengths cancel, only their sum means much" if kappa > LARGE_KAPPA else "")
    note = f"{cancels}\nsum against autograd: off by {float(data.completeness.max()):.0e} (relative)"
    _note(ax, note, right=bool(heavy <= int(data.path_length.max()) / 2))


def _draw_starts(ax: Axes, data: xr.Dataset, result: Result) -> None:
    """Kappa over the layer at whose input the gradient is taken."""
    quiet_frame(ax)
    kappas = data.kappa_from.transpose("layer", "prompt")
    if data.sizes["prompt"] > 1:
        ax.plot(data.layer, kappas, color=BLUE, alpha=0.3, linewidth=0.8)
    # Kappas differ by orders of magnitude, so their mean is a geometric one.
    ax.plot(data.layer, np.exp(np.log(kappas).mean("prompt")), color=BLUE, marker="o", markersize=3.5)
    ax.axhline(LARGE_KAPPA, color=GREY, linewidth=1, linestyle=":", zorder=1)
    ax.set_yscale("log")
    ax.set_ylim(0.8, 2 * max(LARGE_KAPPA, float(kappas.max())))
    ax.xaxis.set_major_locator(MaxNLocator(13, integer=True, steps=[1, 2, 5, 10]))
    ax.set_xlabel("start layer, at whose input the gradient is taken")
    ax.set_ylabel("κ: sizes of all lengths over that of their sum")
    lines = "\nthin lines: each prompt; thick: geometric mean" if data.sizes["prompt"] > 1 else ""
    note = f"above the dotted line, a percentage of one length says little{lines}"
    ax.text(0.985, 0.97, note, transform=ax.transAxes, ha="right", va="top", fontsize=8.5, color=GREY)


def _draw_branches(ax: Axes, data: xr.Dataset, result: Result) -> None:
    """The norm of what paths with so many attention and so many MLP hops carry together, in parts of the gradient."""
    parts = (data.branch_norm / data.gradient_norm).mean("prompt").transpose("attn_hops", "mlp_hops").values
    most = float(parts.max())
    rows, columns = (np.flatnonzero(parts.max(axis) > _FAINTEST * most).max() + 1 for axis in (1, 0))
    norm = LogNorm(_FAINTEST * most, most)
    label = "norm, relative to the whole gradient"
    heatmap(ax, parts[:rows, :columns], cmap=SEQUENTIAL, norm=norm, label=label)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(13, integer=True, steps=[1, 2, 5, 10]))
    ax.set_xlabel(f"MLP hops\n(all cells' norms sum to κ = {spell_number(float(parts.sum()))} times the gradient's)")
    ax.set_ylabel("attention hops")


_PANELS: dict[str, Callable[[Axes, xr.Dataset, Result], None]] = {
    "count": _draw_count,
    "path_norm": _draw_path_norm,
    "histogram": _draw_histogram,
    "share": _draw_share,
}
_OTHERS: dict[str, Callable[[Axes, xr.Dataset, Result], None]] = {"starts": _draw_starts, "branches": _draw_branches}
_TITLES = {
    "count": "How many paths there are",
    "path_norm": "What a single path carries",
    "histogram": "Together: number × norm (Veit et al. 2016)",
    "share": "What each length adds to the gradient, exactly",
    "starts": "How much cancels, by start layer",
    "branches": "By hops through attention and MLPs",
}
_ENDS = ("", "_low", "_high")


def _require_branches(result: Result) -> None:
    if "branch_norm" not in result.data:
        raise ResultError(
            'panel="branches" needs the split by attention and MLP hops, which this result does not have; '
            "measure it with rs.path_lengths(..., by_branch=True)"
        )


def _frame(ax: Axes, data: xr.Dataset, result: Result) -> None:
    quiet_frame(ax)
    ax.set_xlim(-0.8, int(data.path_length.max()) + 0.8)
    ax.xaxis.set_major_locator(MaxNLocator(13, integer=True, steps=[1, 2, 5, 10]))
    ax.set_xlabel(f"path length ({_units(result, named=False)} passed through)")


def _errors(ax: Axes, data: xr.Dataset, mean: xr.DataArray, low: xr.DataArray, high: xr.DataArray) -> None:
    """Thin lines over what an interval covers; none where it is unknown or without an end."""
    sides = [np.where(np.isfinite(side), side, 0.0).clip(min=0) for side in (mean - low, high - mean)]
    ax.errorbar(data.path_length, mean, sides, fmt="none", ecolor="black", elinewidth=0.8, alpha=0.6, zorder=3)


def _note(ax: Axes, text: str, *, right: bool) -> None:
    """A remark in the corner that the bars leave free."""
    box = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 2}
    side, place = ("right", 0.985) if right else ("left", 0.015)
    ax.text(place, 0.97, text, transform=ax.transAxes, ha=side, va="top", fontsize=8.5, bbox=box, zorder=5, **plain())
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.15 * (high - low))


def _say_unsampled(ax: Axes, text: str) -> None:
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
    return f"{100 * share:.2g}%" if share >= 1e-5 else spell_number(share)
