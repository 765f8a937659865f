"""The picture of a logit by path length: what paths of each length add, from the embedding and from the branches."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from resstream.plots.canvas import BLUE, GREY, ORANGE, Place, plain, prompts_of, quiet_frame, title, variable_of
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
    total = float(data.constant) + np.cumsum(terms)
    ax = place.axes(7.6, 4.4)
    ax.bar(lengths, terms, width=0.8, color=np.where(terms < 0, ORANGE, BLUE), zorder=2, label="paths of this length")
    ax.step(lengths, total, where="mid", color="black", linewidth=1.2, zorder=3, label="sum up to this length")
    ax.axhline(float(data.logit), color=GREY, linewidth=1, linestyle=":", zorder=1, label="the model's logit")
    ax.axhline(0, color="black", linewidth=0.9, zorder=3)
    quiet_frame(ax)
    # Beyond the last length that adds anything there is only empty axis.
    heavy = np.flatnonzero(np.abs(terms) > 1e-3 * np.abs(terms).max())
    ax.set_xlim(-0.8, max(float(heavy.max(initial=0)), 4) + 1.8)
    ax.xaxis.set_major_locator(MaxNLocator(13, integer=True, steps=[1, 2, 5, 10]))
    ax.set_xlabel("path length (branches passed through; what starts in a branch counts it)")
    ax.set_ylabel(f"{result.settings['metric']}\n(logits)", **plain())
    ax.legend(frameon=False, fontsize=8.5)
    gauge = f"gauge {result.settings['gauge']}: {result.settings['meaning']}"
    title(ax, result, f"{result.settings['metric']} in {result.model}, by length of path", gauge)
    return ax
