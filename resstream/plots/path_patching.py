"""The picture of path patching: senders over receivers, coloured by how much of the gap each path moves."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from resstream.plots.canvas import (
    DIVERGING,
    SEQUENTIAL,
    Place,
    cell_number,
    choose,
    heatmap,
    metric_of,
    prompts_of,
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

_HEAD = re.compile(r"(\d+)\.head\.(\d+)")
_GOALS = {"denoise": "restored", "noise": "removed"}
_WHAT = {"path_patching": "Path patching", "direct_effects": "Direct effects"}


def draw_path_patching(
    place: Place, result: Result, *, prompt: int | None = None, receiver: str | None = None, show: str = "value"
) -> Axes:
    """Heatmap of senders over receivers; of one receiver, it is layers over heads, or senders over positions.

    Args:
        place: where to draw.
        result: of `path_patching` or `direct_effects`.
        prompt: which prompt; by default the mean over all of them.
        receiver: one receiver; by default all of them, or the first, where senders were moved at single positions.
        show: what is written into the cells: the "value" where it is not small, or "none".
    """
    choose(show, ("value", "none"), "show", result.measure)
    for name in ("effect", "mean_effect"):
        variable_of(result, name)
    receivers = [str(each) for each in result.data.receiver.values]
    if receiver is not None:
        choose(receiver, receivers, "receiver", result.measure)
    data = prompts_of(result, prompt)
    defined = bool(data.effect.notnull().any())
    if defined:
        cells = data.mean_effect if prompt is None else data.effect.isel(prompt=0)
    else:
        cells = data.metric.mean("prompt")
    if receiver is None and (len(receivers) == 1 or "position" in cells.dims):
        receiver = receivers[0]
    table = _table(data, cells, receiver)
    ax = place.axes(2.6 + 0.34 * len(table.columns), 1.9 + 0.2 * max(len(table.rows), 8))
    norm = spread(table.values, centred=defined)
    cmap, lines = (DIVERGING, "#e9e9e9") if defined else (SEQUENTIAL, "white")
    image = heatmap(ax, table.values, cmap=cmap, norm=norm, label=_label(result, defined), grid=lines)
    if show == "value":
        # A diverging map loses its sign in grey, so the cells that matter say it in figures.
        large = np.abs(table.values) >= (0.15 * norm.vmax if defined else 0)  # type: ignore[operator]
        write_cells(image, np.where(large, np.vectorize(cell_number, otypes=[object])(table.values), ""))
    row_ticks(ax, table.rows)
    if table.across == "head":
        row_ticks(ax, table.columns, along="x")
    else:
        token_ticks(ax, table.columns)
    ax.set_ylabel(table.up)
    ax.set_xlabel(table.across)
    to = "" if receiver is None else f", to {receiver}"
    what = f"{_WHAT.get(result.measure, result.measure)} of {result.model}{to}{whose(result, prompt, 'pair')}"
    clean, corrupted = float(data.clean.mean()), float(data.corrupted.mean())
    gap = f"clean {clean:.2f}, corrupted {corrupted:.2f} {metric_of(result)[1]}".replace("-", "−")
    title(ax, result, what, gap)
    return ax


@dataclass(frozen=True)
class _Table:
    """What is drawn: the numbers, and what rows and columns are."""

    values: np.ndarray
    rows: list[str]
    columns: list[str]
    up: str
    across: str


def _table(data: xr.Dataset, cells: xr.DataArray, receiver: str | None) -> _Table:
    senders = [str(each) for each in cells.sender.values]
    if receiver is None:
        receivers = [str(each) for each in cells.receiver.values]
        return _Table(cells.transpose("sender", "receiver").values, senders, receivers, "sender", "receiver")
    cells = cells.sel(receiver=receiver)
    if "position" in cells.dims:
        values = cells.transpose("sender", "position").values
        return _Table(values, senders, _places(data), "sender", "token at which it was moved")
    heads = [_HEAD.fullmatch(sender) for sender in senders]
    if not all(heads):
        return _Table(cells.values[:, None], senders, [receiver], "sender", "receiver")
    at = [(int(head[1]), int(head[2])) for head in heads if head]
    layers, numbers = (sorted({place[axis] for place in at}) for axis in (0, 1))
    values = np.full((len(layers), len(numbers)), np.nan)
    for (layer, number), value in zip(at, cells.values, strict=True):
        values[layers.index(layer), numbers.index(number)] = value
    return _Table(values, list(map(str, layers)), list(map(str, numbers)), "layer", "head")


def _places(data: xr.Dataset) -> list[str]:
    """A label for each column of positions: its token, or its name where prompts have different ones."""
    labels = []
    for column, position in enumerate(data.position.values):
        here = data.isel(position=column)
        pairs = {(str(a), str(b)) for a, b in zip(here.token.values, here.corrupted_token.values, strict=True)}
        tokens = dict.fromkeys(text for pair in pairs for text in pair)
        labels.append("→".join(spell(text, 16) for text in tokens) if len(pairs) == 1 else f"position {position}")
    return labels


def _label(result: Result, defined: bool) -> str:
    """What the colours mean."""
    if not defined:
        name, units = metric_of(result)
        return f"{name} ({units});\nno effect, since both runs agree"
    direction = str(result.settings.get("direction", "denoise"))
    return f"share of the gap {_GOALS.get(direction, 'moved')} ({direction})"
