"""The picture of a stream's health: sizes, writes, gradient, rank, attention and drift, from the bottom to the top."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

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
    quiet_frame,
    readable,
    title,
    title_text,
    variable_of,
    whose,
)
from resstream.plots.paths import carried_of
from resstream.result import Result

_STYLES = ("-", "--", ":")


def draw_health(place: Place, result: Result, *, prompt: int | None = None, panel: str | None = None) -> Axes:
    """Six panels over depth, or one of them.

    Args:
        place: where to draw; Axes hold one panel, an empty figure six.
        result: of `stream_health`.
        prompt: which prompt; by default the mean over all of them.
        panel: "norm", "write", "gradient", "rank", "attention" or "drift"; by default the norm on Axes, all on a
            figure.
    Returns:
        The Axes of the panel, or of the first of the six.
    """
    variable_of(result, "norm")
    data = prompts_of(result, prompt)
    which = whose(result, prompt)
    if panel is not None or place.ax is not None:
        name = choose(panel or "norm", tuple(_PANELS), "panel", result.measure)
        ax = place.axes(6.4, 4.0)
        _PANELS[name](ax, data)
        _frame(ax, data)
        title(ax, result, f"{_TITLES[name]}, {result.model}{which}", *carried_of(result))
        return ax
    figure = place.sized(13.5, 7.4)
    grid = figure.subplots(2, 3)
    for (name, draw), ax in zip(_PANELS.items(), grid.flat, strict=True):
        draw(ax, data)
        _frame(ax, data)
        ax.set_title(_TITLES[name], loc="left", fontsize="medium")
    text, look = title_text(result, f"Health of {result.model}{which}: {_faults(result)}", *carried_of(result))
    figure.suptitle(text, x=0.01, ha="left", **look)
    first: Axes = grid[0, 0]
    return first


def _faults(result: Result) -> str:
    named = [str(name) for name in result.data.pitfall.values[result.data.found.values.astype(bool)]]
    return readable(", ".join(named)) if named else f"none of {result.data.sizes['pitfall']} pitfalls"


def _draw_norm(ax: Axes, data: xr.Dataset) -> None:
    x = _depths(data.site.values)
    ax.plot(x, data.first_norm.mean("prompt"), color=ORANGE, linestyle="--", label="position 0")
    ax.plot(x, data.norm.mean("prompt"), color=BLUE, label="median of the others")
    ax.set_yscale("log")
    ax.set_ylabel("norm of the stream")


def _draw_write(ax: Axes, data: xr.Dataset) -> None:
    kinds = np.array([str(name).rpartition(".")[2] for name in data.write.values])
    x, sizes = _depths(data.write.values), data.ratio.mean("prompt").values
    for kind, label, colour, marker in (("attn", "attention", BLUE, "o"), ("mlp", "MLP", GREEN, "s")):
        some = (kinds == kind) & (sizes > 0)
        if some.any():
            ax.plot(x[some], sizes[some], color=colour, marker=marker, markersize=3.5, linewidth=1, label=label)
    ax.set_yscale("log")
    ax.set_ylabel("size of a write\n(share of the stream that it is added to)")


def _draw_gradient(ax: Axes, data: xr.Dataset) -> None:
    slope = data.gradient_norm.mean("prompt").values
    if not np.isfinite(slope).any():
        _say(ax, "no gradient was taken (gradients=False)")
        return
    ax.plot(_depths(data.site.values), slope, color=BLUE, label="gradient of the loss")
    ax.set_yscale("log")
    ax.set_ylabel("norm of the gradient\n(nats per unit of stream)")


def _draw_rank(ax: Axes, data: xr.Dataset) -> None:
    """All on one scale, which ends at 1: no token like another, or all of them alike."""
    x = _depths(data.site.values)
    left, cosine = data.rank_residual.mean("prompt").values, data.token_cosine.mean("prompt").values
    if not np.isfinite(left).any():
        _say(ax, "one token a prompt: none to compare")
        return
    ax.plot(x, left, color=BLUE, label="distance from the mean token")
    ax.plot(x, cosine, color=ORANGE, linestyle="--", label="mean cosine of two tokens")
    rank = data.effective_rank.mean("prompt").values
    ax.plot(x, rank / np.nanmax(rank), color=GREEN, linestyle=":", label=f"effective rank (1: {np.nanmax(rank):.0f})")
    ax.set_ylim(min(0.0, float(np.nanmin(cosine))) - 0.02, 1.05)
    ax.set_ylabel("how different tokens are")


def _draw_attention(ax: Axes, data: xr.Dataset) -> None:
    entropy, first = data.entropy.mean("prompt"), data.first_share.mean("prompt")
    if not np.isfinite(entropy.values).any():
        _say(ax, "no attention pattern could be read")
        return
    x = np.broadcast_to(data.layer.values[:, None] + 0.5, entropy.shape)
    ax.plot(x.ravel(), entropy.values.ravel(), "o", color=BLUE, markersize=3, alpha=0.35, markeredgewidth=0)
    ax.plot(x[:, 0], entropy.mean("head"), color=BLUE, label="entropy, of what is possible")
    ax.plot(x[:, 0], first.mean("head"), color=ORANGE, linestyle="--", label="share of position 0")
    ax.set_ylim(-0.02, 1.02)
    ax.set_ylabel("attention (points: heads)")


def _draw_drift(ax: Axes, data: xr.Dataset) -> None:
    x, drawn = _depths(data.site.values), False
    for style, precision in zip(_STYLES, data.precision.values, strict=False):
        for name, label, colour in (("trunk_drift", "trunk alone", BLUE), ("model_drift", "whole model", RED)):
            drift = data[name].sel(precision=precision).mean("prompt").values
            if (drift > 0).any():
                ax.plot(x, drift, color=colour, linestyle=style, label=f"{label} in {precision}")
                drawn = True
    own = data.own_drift.mean("prompt").values
    if (own > 0).any():
        ax.plot(x, np.where(own > 0, own, np.nan), color=GREY, linewidth=1, label="as it is")
        drawn = True
    if not drawn:
        _say(ax, "no drift was measured")
        return
    ax.set_yscale("log")
    ax.set_ylabel("distance from the exact stream\n(relative)")


def _depths(names: np.ndarray) -> np.ndarray:
    """How far up a state or a write is, in layers."""
    above = {"resid_pre": 0.0, "attn": 0.25, "resid_mid": 0.5, "mlp": 0.75, "resid_post": 1.0}
    parts = [str(name).split(".") for name in names]
    return np.array([int(layer) + above[kind] for layer, kind in parts])


def _frame(ax: Axes, data: xr.Dataset) -> None:
    quiet_frame(ax)
    ax.set_xlim(-0.02 * data.sizes["layer"], 1.02 * data.sizes["layer"])
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    ax.set_xlabel("layer")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize=8.5)


def _say(ax: Axes, what: str) -> None:
    ax.text(0.5, 0.5, what, transform=ax.transAxes, ha="center", va="center", color=GREY, **plain())
    ax.set_ylabel("not measured")


_PANELS: dict[str, Callable[[Axes, xr.Dataset], None]] = {
    "norm": _draw_norm,
    "write": _draw_write,
    "gradient": _draw_gradient,
    "rank": _draw_rank,
    "attention": _draw_attention,
    "drift": _draw_drift,
}
_TITLES = {
    "norm": "Size of the stream",
    "write": "Size of the writes",
    "gradient": "Gradient of the loss",
    "rank": "Tokens against each other",
    "attention": "Attention",
    "drift": "Drift by precision",
}
