"""The picture of a lesion curve: what is lost as more of the stack is disturbed, beside its control."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from resstream.plots.canvas import (
    BLUE,
    GREY,
    ORANGE,
    Place,
    choose,
    plain,
    prompts_of,
    quiet_frame,
    readable,
    title,
    variable_of,
    whose,
)
from resstream.result import Result

_SHOWN = {"loss": "effect", "kl": "kl", "top1": "top1"}
_LABELS = {
    "loss": "change of the loss (nats)",
    "kl": "KL divergence from the whole model\n(nats)",
    "top1": "positions with the whole model's\nlikeliest token",
}


def draw_lesions(place: Place, result: Result, *, prompt: int | None = None, show: str = "loss") -> Axes:
    """Mean over draws with its interval, each draw as a point, and the control dashed.

    Args:
        place: where to draw.
        result: of `lesion_curve`.
        prompt: which prompt; by default the mean over all of them.
        show: what is lost: "loss", "kl" or "top1".
    """
    name = _SHOWN[choose(show, tuple(_SHOWN), "show", result.measure)]
    variable_of(result, name)
    data = prompts_of(result, prompt)
    # The intervals of a result are over all its prompts, so one of several has none.
    banded = data.sizes["prompt"] == result.data.sizes["prompt"]
    ax = place.axes(7.0, 4.3)
    ranked = result.settings.get("how") == "shuffle"
    x = data.kendall_tau.mean("sample").values if ranked else data.lesion.values
    points = _points(data, name)
    if points is not None:
        places = data.kendall_tau.values if ranked else np.broadcast_to(data.lesion.values[:, None], points.shape)
        ax.plot(places.ravel(), points.ravel(), "o", color=BLUE, markersize=3, alpha=0.35, markeredgewidth=0, zorder=2)
    _curve(ax, x, data, name, BLUE, "-", _lesion(result), banded)
    control = _curve(ax, x, data, f"{name}_control", ORANGE, "--", _control(result), banded)
    quiet_frame(ax)
    if show == "top1":
        ax.set_ylim(-0.02, 1.02)
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    else:
        ax.axhline(0, color="black", linewidth=0.9, zorder=1)
        ends = [data[f"{name}_{end}"].values for end in ("low", "high")] if banded else []
        _limit(ax, np.concatenate([data[name].values.ravel() if points is None else points.ravel(), *ends]), control)
        if show == "loss":
            _mark_guess(ax, result, data)
    if ranked:
        ax.set_xlim(*ax.get_xlim()[::-1])
        ax.set_xlabel(f"Kendall's τ of the order of {result.settings.get('unit', 'layer')}s (1: the model's own)")
    else:
        ax.xaxis.set_major_locator(MaxNLocator(12, integer=True, steps=[1, 2, 5, 10]))
        ax.set_xlabel(readable(str(result.settings.get("counted", "lesion"))), **plain())
    ax.set_ylabel(_LABELS[show])
    ax.legend(frameon=False, fontsize=9)
    of = f"{result.model}, {result.settings.get('units_in_stack', '?')} {result.settings.get('unit', 'layer')}s"
    whole = f"whole model: loss {float(data.base_loss.mean()):.2f} nats"
    said = _said(result, data, points, banded)
    title(ax, result, f"Lesions of {of}: {result.settings.get('how', '?')}{whose(result, prompt)}", whole, *said)
    return ax


def _curve(
    ax: Axes, x: np.ndarray, data: xr.Dataset, name: str, colour: str, style: str, label: str, banded: bool
) -> Line2D:
    """One line with its band."""
    if banded:
        low, high = data[f"{name}_low"].values, data[f"{name}_high"].values
        ax.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0, zorder=2)
    mean = data[name].mean(("prompt", "sample")).values
    (line,) = ax.plot(x, mean, color=colour, linestyle=style, marker="o", markersize=4, label=label, zorder=3)
    return line


def _points(data: xr.Dataset, name: str) -> np.ndarray | None:
    """The draws, or where there is only one, the prompts: "lesion point"; None where there is one of each."""
    along = "sample" if data.sizes["sample"] > 1 else "prompt"
    if data.sizes[along] == 1:
        return None
    other = "prompt" if along == "sample" else "sample"
    values: np.ndarray = data[name].mean(other).transpose("lesion", along).values
    return values


def _limit(ax: Axes, lesion: np.ndarray, control: Line2D) -> None:
    """Show all of the lesion; a control that is far worse leaves the picture, and its label says how far."""
    drawn, beside = (each[np.isfinite(each)] for each in (lesion, np.asarray(control.get_ydata(), dtype=float)))
    top, worst = float(drawn.max(initial=1e-9)), float(beside.max(initial=0.0))
    bottom = min(float(drawn.min(initial=0.0)), float(beside.min(initial=0.0)))
    if worst > 1.5 * top:
        control.set_label(f"{control.get_label()} (up to {worst:.3g})")
        worst = top
    height = max(top, worst) - bottom
    ax.set_ylim(bottom - 0.04 * height, max(top, worst) + 0.08 * height)


def _mark_guess(ax: Axes, result: Result, data: xr.Dataset) -> None:
    """The loss of a uniform guess, if anything here is near it."""
    guess = float(result.settings.get("uniform_loss", np.inf)) - float(data.base_loss.mean())
    if guess < ax.get_ylim()[1]:
        ax.axhline(guess, color=GREY, linewidth=1.0, linestyle=":", zorder=1, label="a uniform guess")


def _lesion(result: Result) -> str:
    how = str(result.settings.get("how", "lesion"))
    return {"swap": "swapped with the next"}.get(how, readable(str(result.settings.get("counted", how))))


def _control(result: Result) -> str:
    return f"control: {readable(str(result.settings.get('control', 'deleted')))}"


def _said(result: Result, data: xr.Dataset, points: np.ndarray | None, banded: bool) -> list[str]:
    """What points and bands are, as a line of the title if there are any."""
    parts = []
    if points is not None:
        parts.append(f"points: each {'draw' if data.sizes['sample'] > 1 else 'prompt'}")
    over = str(result.settings.get("interval", "nothing"))
    if banded and over != "nothing":
        parts.append(f"bands: 95% bootstrap over {over}")
    return ["; ".join(parts)] if parts else []
