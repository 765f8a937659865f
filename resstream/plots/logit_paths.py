"""The picture of a logit by path length: what paths of each length add, and how their sum comes to the logit."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from resstream.plots.canvas import (
    BLUE,
    GREY,
    ORANGE,
    Place,
    metric_of,
    plain,
    prompts_of,
    quiet_frame,
    title,
    variable_of,
    whose,
)
from resstream.plots.paths import carried_of, spell_number
from resstream.result import Result


def draw_logit_paths(place: Place, result: Result, *, prompt: int = 0) -> Axes:
    """Bars of the term of each length, and the running sum that ends at the logit; the gauge is printed with them.

    Args:
        place: where to draw.
        result: of `logit_by_path_length`.
        prompt: which prompt.
    """
    variable_of(result, "term")
    data = prompts_of(result, prompt).isel(prompt=0)
    terms, lengths = data.term.values, data.path_length.values
    ax = place.axes(7.6, 4.4)
    # The sign is the direction of the bar; the colour only repeats it.
    ax.bar(lengths, terms, width=0.8, color=np.where(terms < 0, ORANGE, BLUE), zorder=2)
    total = float(data.constant) + np.cumsum(terms)
    (sum_line,) = ax.step(lengths, total, where="mid", color="black", linewidth=1.2, zorder=3)
    logit_line = ax.axhline(float(data.logit), color=GREY, linewidth=1.2, linestyle=":", zorder=1)
    ax.axhline(0, color="black", linewidth=0.9, zorder=3)
    quiet_frame(ax)
    # Beyond the last length that adds anything there is only empty axis.
    heavy = np.flatnonzero(np.abs(terms) > 1e-3 * np.abs(terms).max())
    ax.set_xlim(-0.8, max(float(heavy.max(initial=0)), 4) + 1.8)
    ax.xaxis.set_major_locator(MaxNLocator(13, integer=True, steps=[1, 2, 5, 10]))
    ax.set_xlabel("path length (branches passed through; one that paths begin in counts)")
    name, units = metric_of(result)
    ax.set_ylabel(f"{name}\n({units})", **plain())
    lines = {
        "for the answer": Patch(color=BLUE),
        "against it": Patch(color=ORANGE),
        "sum up to this length": sum_line,
        f"the model's own: {float(data.logit):.2f}".replace("-", "−"): logit_line,
    }
    kappa = f"κ = {spell_number(float(data.kappa))}: sizes of the terms, over that of their sum"
    ax.legend([*lines.values()], [*lines], frameon=False, fontsize=8.5)
    gauge = f"gauge {result.settings.get('gauge', '?')}: {result.settings.get('meaning', '')}"
    of = f"{name} in {result.model}, by length of path{whose(result, prompt)}"
    title(ax, result, of, gauge, kappa, *carried_of(result))
    return ax
