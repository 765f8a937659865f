"""The picture of a logit lens: sites over positions, coloured by what each would predict."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize

from resstream.plots.canvas import (
    SEQUENTIAL,
    Place,
    choose,
    heatmap,
    prompts_of,
    row_ticks,
    spell,
    spread,
    title,
    token_ticks,
    variable_of,
    write_cells,
)
from resstream.result import Result

VARIABLES = ("log_prob", "rank", "entropy", "kl", "loss")


def draw_lens(place: Place, result: Result, *, prompt: int = 0, variable: str = "log_prob", show: str = "top") -> Axes:
    """Heatmap of one variable over sites (bottom: the first) and positions.

    Args:
        place: where to draw.
        result: of `logit_lens`.
        prompt: which prompt.
        variable: "log_prob" or "rank" of the target, "entropy", "kl" or "loss".
        show: what is written into each cell: the "top" token there, the "value" of the variable, or "none".
            Bold: the target is the most likely token there.
    """
    choose(variable, VARIABLES, "variable", result.measure)
    choose(show, ("top", "value", "none"), "show", result.measure)
    variable_of(result, variable)
    data = prompts_of(result, prompt).isel(prompt=0).transpose("site", "position", ...)
    values = data[variable].values
    rows, columns = values.shape
    ax = place.axes(2.2 + 0.7 * columns, 1.6 + 0.235 * max(rows, 11))
    label = _label(data, variable)
    image = heatmap(ax, values, cmap=_colours(variable), norm=_norm(values, variable), label=label)
    if show != "none":
        top = data.top_string.isel(top=0).values
        texts = top if show == "top" else np.vectorize(lambda value: _number(value, variable), otypes=[object])(values)
        write_cells(image, texts, strong=data["rank"].values == 1)
    row_ticks(ax, _site_labels([str(site) for site in data.site.values]))
    ax.set_ylabel(_site_axis([str(site) for site in data.site.values]))
    token_ticks(ax, [spell(str(token), 24) for token in data.token.values])
    ax.set_xlabel("token that has been read")
    which = f", prompt {prompt}" if result.data.sizes["prompt"] > 1 else ""
    title(ax, result, f"Logit lens of {result.model}{which}: what each layer would predict next")
    return ax


def _label(data: xr.Dataset, variable: str) -> str:
    """What the colours mean, with its unit."""
    targets = {str(target) for target in data.target_string.values}
    target = f"“{spell(targets.pop())}”" if len(targets) == 1 else "the token\nthat the model predicts in the end"
    return {
        "log_prob": f"log-probability of {target} (nats)",
        "rank": f"rank of {target} (1 = most likely)",
        "entropy": "entropy of the prediction (nats)",
        "kl": "KL divergence from\nthe last layer's prediction (nats)",
        "loss": "loss of the prompt's own next token (nats)",
    }[variable]


def _colours(variable: str) -> str:
    """Bright is near the answer, whichever way the variable counts."""
    return SEQUENTIAL if variable in ("log_prob", "entropy") else f"{SEQUENTIAL}_r"


def _norm(values: np.ndarray, variable: str) -> Normalize:
    """Ranks run over orders of magnitude, the others do not."""
    if variable == "rank":
        return LogNorm(1, max(10.0, float(np.nanmax(values, initial=1.0))))
    return spread(values, tail="low" if variable == "log_prob" else "high")


def _number(value: float, variable: str) -> str:
    if np.isnan(value):
        return ""
    return f"{value:.0f}" if variable == "rank" else f"{value:.1f}"


def _site_labels(sites: list[str]) -> list[str]:
    """Layer numbers where all sites are of one kind, but for the embedding below them; full names otherwise."""
    if _shared_kind(sites) is None:
        return sites
    return ["embed" if _is_embedding(site, sites) else site.partition(".")[0] for site in sites]


def _site_axis(sites: list[str]) -> str:
    kind = _shared_kind(sites)
    return "site" if kind is None else f"layer ({kind})"


def _shared_kind(sites: list[str]) -> str | None:
    kinds = {site.partition(".")[2] for site in sites if not _is_embedding(site, sites)}
    return kinds.pop() if len(kinds) == 1 else None


def _is_embedding(site: str, sites: list[str]) -> bool:
    return site == "0.resid_pre" and any(not other.endswith(".resid_pre") for other in sites)
