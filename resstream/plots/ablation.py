"""The picture of an ablation: for each removed unit, how far the metric moved."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from resstream.plots.canvas import (
    BLUE,
    ORANGE,
    Place,
    metric_of,
    plain,
    prompts_of,
    quiet_frame,
    row_ticks,
    title,
    variable_of,
    whose,
)
from resstream.result import Result

_HOW = {
    "skip": "skipped",
    "zero": "set to zero",
    "mean": "replaced by its mean",
    "resample": "replaced by another prompt's",
}
_BRANCHES = {"attn": "attention branch", "mlp": "MLP branch"}


def draw_ablation(place: Place, result: Result, *, prompt: int | None = None) -> Axes:
    """Bars of the change that removing each unit makes, with every prompt as a point.

    Args:
        place: where to draw.
        result: of `ablate_layers`.
        prompt: which prompt; by default the mean over all of them.
    """
    variable_of(result, "effect")
    data = prompts_of(result, prompt)
    each = data.effect.transpose("prompt", "unit")
    mean = each.mean("prompt").values
    unit = str(result.settings.get("unit", "unit"))
    names = [str(name).replace(f".{unit}", "") for name in each.unit.values]
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
    branch = _BRANCHES.get(unit, unit)
    gone = _HOW.get(str(result.settings.get("how")), "removed")
    ax.set_xlabel(f"layer that was {gone}" if unit == "layer" else f"layer whose {branch} was {gone}")
    metric, units = metric_of(result)
    ax.set_ylabel(f"change of {metric}\n({units})", **plain())
    points = " (points: each one)" if each.sizes["prompt"] > 1 else ""
    whole = f"whole model: {float(data.base.mean()):.2f} {units}".replace("-", "−")
    title(ax, result, f"Ablation of {result.model}, {branch} by {branch}{whose(result, prompt)}{points}", whole)
    return ax
