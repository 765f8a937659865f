"""What the pictures share: where they go, how tokens are spelled on them, heatmaps, titles and prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from resstream.errors import ResultError, listed
from resstream.result import Result

SEQUENTIAL, DIVERGING = "viridis", "RdBu_r"
# Okabe and Ito's palette, which colour-blind readers can tell apart; these differ in lightness too.
BLUE, ORANGE, GREEN, GREY, RED = "#0072B2", "#E69F00", "#009E73", "#6b6b6b", "#b00020"

# Matplotlib's own font has no ideographs and no emoji; whichever of these is installed lends its own.
_FALLBACKS = (
    "Noto Sans CJK JP",
    "Noto Sans CJK SC",
    "Noto Sans CJK KR",
    "Source Han Sans",
    "Hiragino Sans",
    "PingFang SC",
    "Apple SD Gothic Neo",
    "Yu Gothic",
    "Meiryo",
    "Microsoft YaHei",
    "Malgun Gothic",
    "WenQuanYi Zen Hei",
    "Droid Sans Fallback",
    "Arial Unicode MS",
    "Noto Sans",
    "Noto Sans Arabic",
    "Noto Sans Devanagari",
    "Noto Emoji",
)
_WIDEST, _TALLEST = 30.0, 24.0


@dataclass(frozen=True)
class Place:
    """Where a picture goes: into Axes of the caller's, or onto an empty figure that it sizes itself.

    Exactly one of the two is given.
    """

    ax: Axes | None = None
    figure: Figure | None = None

    def axes(self, width: float, height: float) -> Axes:
        """The Axes to draw on; an empty figure takes this size, in inches, within reason."""
        if self.ax is not None:
            return self.ax
        return self.sized(width, height).add_subplot()

    def sized(self, width: float, height: float) -> Figure:
        """The empty figure at this size, in inches, within reason."""
        assert self.figure is not None
        self.figure.set_size_inches(min(width, _WIDEST), min(height, _TALLEST))
        return self.figure


def visible(text: str) -> str:
    r"""A token as it can be seen: spaces as dots, controls as escapes.

    >>> visible(" a\n")
    '·a\\n'
    """
    return "".join("·" if letter == " " else letter if letter.isprintable() else _escaped(letter) for letter in text)


def spell(text: str, limit: int | None = None) -> str:
    r"""A token as it can be drawn: visible, and with escapes for letters that no font here has.

    >>> spell(" a\n")
    '·a\\n'

    Args:
        text: the token.
        limit: most characters to show; the rest becomes an ellipsis.
    """
    drawable = _letters(tuple(mpl.rcParams["font.family"]))[1]
    shown = "".join(letter if ord(letter) in drawable else _escaped(letter) for letter in visible(text)) or "''"
    return shown if limit is None or len(shown) <= limit else shown[: max(1, limit - 1)] + "…"


def readable(text: str) -> str:
    """A name or a sentence with its spaces, in which letters that no font has are escapes."""
    return " ".join(spell(word) if word else "" for word in text.split(" "))


def plain() -> dict[str, Any]:
    """How text is set that may hold anything: a "$" starts no formula, and other scripts get a font if one is there."""
    return {"parse_math": False, "usetex": False, "family": _letters(tuple(mpl.rcParams["font.family"]))[0]}


def title(ax: Axes, result: Result, *lines: str) -> None:
    """Say what a picture shows."""
    text, look = title_text(result, *lines)
    ax.set_title(text, loc="left", **look)


def title_text(result: Result, *lines: str) -> tuple[str, dict[str, Any]]:
    """A title and its look; where the result's check failed, it says that first of all."""
    failed = () if result.check.passed else (f"check FAILED, do not rely on this: {result.check}",)
    look = {"fontsize": 11, **({"color": RED} if failed else {}), **plain()}
    return "\n".join(readable(line) for line in (*failed, *lines)), look


def metric_of(result: Result, number: int = 0) -> tuple[str, str]:
    """The name and the unit of the metric that a result is about, or of one of them where there are several."""
    both = (result.settings.get("metric", "metric"), result.settings.get("units", "its own units"))
    name, units = (str(each[number] if isinstance(each, list) else each) for each in both)
    return readable(name.replace(" - ", " − ")), readable(units)


def whose(result: Result, prompt: int | None, what: str = "prompt") -> str:
    """The part of a title that says which prompts a picture is of; nothing where there is only one."""
    count = result.data.sizes["prompt"]
    if count == 1:
        return ""
    return f", mean of {count} {what}s" if prompt is None else f", {what} {prompt}"


def prompts_of(result: Result, prompt: int | None) -> xr.Dataset:
    """The data of one prompt, or of all, with its prompt dimension, and without columns beyond every prompt's end.

    Raises:
        ResultError: no such prompt.
    """
    count = result.data.sizes["prompt"]
    if prompt is not None and prompt not in range(count):
        raise ResultError(f"no prompt {prompt!r}: this {result.measure} result has prompts 0-{count - 1}; try prompt=0")
    data = result.data if prompt is None else result.data.isel(prompt=[prompt])
    # Positions that were chosen by name are there in every prompt.
    if "position" in data.dims and "length" in data and np.issubdtype(data.position.dtype, np.integer):
        data = data.isel(position=np.flatnonzero(data.position.values < data.length.values.max()))
    return data


def choose(value: Any, known: Sequence[str], option: str, measure: str) -> str:
    """An option's value, if it is one of those that exist.

    Raises:
        ResultError: it is not.
    """
    if value not in known:
        raise ResultError(f"{option}={value!r} is not in the picture of {measure}: choose from {listed(known)}")
    return str(value)


def variable_of(result: Result, name: str) -> xr.DataArray:
    """A variable that a picture needs.

    Raises:
        ResultError: the result does not have it.
    """
    if name not in result.data:
        raise ResultError(
            f'a picture of {result.measure} needs the variable "{name}", and this result has '
            f"{listed(result.data.data_vars)}; give a result as the measure returned it"
        )
    return result.data[name]


def heatmap(
    ax: Axes, values: np.ndarray, *, cmap: str, norm: Normalize, label: str | None, grid: str = "white"
) -> AxesImage:
    """An image whose first row is at the bottom, with a labelled colour bar; grey where there is no number.

    Args:
        ax: where to draw.
        values: one number a cell.
        cmap, norm: name of the colour map, and the range that it covers; the bar shows whether values go beyond.
        label: what the colours mean, with the unit; None leaves the bar to `colour_bar`, which several images share.
        grid: colour of the thin lines between cells.
    """
    colours = mpl.colormaps[cmap].with_extremes(bad="#d9d9d9")
    image = ax.imshow(values, cmap=colours, norm=norm, origin="lower", aspect="auto", interpolation="nearest")
    if label is not None:
        colour_bar(image, [ax], label)
    if min(inches / count for inches, count in zip(_inches(ax), values.shape[::-1], strict=True)) > 0.05:
        ax.set_xticks(np.arange(1, values.shape[1]) - 0.5, minor=True)
        ax.set_yticks(np.arange(1, values.shape[0]) - 0.5, minor=True)
        ax.grid(which="minor", color=grid, linewidth=0.6)
        ax.tick_params(which="minor", length=0)
    ax.set_xlim(-0.5, values.shape[1] - 0.5)
    ax.set_ylim(-0.5, values.shape[0] - 0.5)
    ax.tick_params(length=2)
    ax.spines[:].set_visible(False)
    return image


def colour_bar(image: AxesImage, axes: Sequence[Axes], label: str) -> None:
    """A labelled bar for one image, or for several that have the same colours; it shows whether values go beyond."""
    values, norm = image.get_array(), image.norm
    assert values is not None
    beyond = (bool((values < norm.vmin).any()), bool((values > norm.vmax).any()))
    extend = {(True, False): "min", (False, True): "max", (True, True): "both"}.get(beyond, "neither")
    share = min(len(axes), 2)
    look: dict[str, Any] = {"fraction": 0.05 / share, "aspect": 35 * share, "pad": 0.015}
    bar = axes[0].figure.colorbar(image, ax=list(axes), extend=extend, **look)
    bar.set_label(label, **plain())
    bar.outline.set_visible(False)


def write_cells(image: AxesImage, texts: np.ndarray, *, strong: np.ndarray | None = None) -> None:
    """Write a text into each cell of a heatmap, as large as fits; none at all where nothing readable would fit.

    Args:
        image: the heatmap.
        texts: one string a cell; an empty one writes nothing.
        strong: True in cells whose text is set in bold.
    """
    ax = image.axes
    values = np.ma.masked_invalid(image.get_array())  # type: ignore[arg-type]
    width, height = (inches / count for inches, count in zip(_inches(ax), values.shape[::-1], strict=True))
    size = min(7.5, 0.62 * 72 * height)
    letters = int(width * 72 / (0.62 * size))
    if size < 4 or letters < 3:
        return
    colours = image.to_rgba(values)
    # How light a colour looks, by the usual weights of red, green and blue.
    dark = colours[..., :3] @ [0.299, 0.587, 0.114] < 0.5
    look = plain()
    for (row, column), text in np.ndenumerate(texts):
        if text:
            written = ax.text(
                column,
                row,
                spell(text, letters),
                size=size,
                ha="center",
                va="center",
                color="white" if dark[row, column] else "black",
                weight="bold" if strong is not None and strong[row, column] else "normal",
                clip_on=True,
                **look,
            )
            # Hundreds of texts inside the image would slow the layout down, and cannot change it.
            written.set_in_layout(False)


def cell_number(value: float) -> str:
    """A number as short as a cell needs it, in two decimals; nothing for none.

    >>> cell_number(0.314), cell_number(-0.05), cell_number(10.5), cell_number(float("nan"))
    ('.31', '−.05', '10.50', '')
    """
    text = "" if np.isnan(value) else f"{abs(value):.2f}".removeprefix("0")
    return f"−{text}" if text and value < 0 else text


def token_ticks(ax: Axes, labels: Sequence[str]) -> None:
    """One tick for each column, spelled with its token; only every so many where they would touch."""
    step = _step(len(labels), _inches(ax)[0])
    places = range(0, len(labels), step)
    upright = len(labels) > 40
    ax.set_xticks(
        places,
        [labels[place] for place in places],
        rotation=90 if upright else 45,
        ha="center" if upright else "right",
        va="top",
        rotation_mode="default" if upright else "anchor",
        fontsize=8.5,
        **plain(),
    )


def row_ticks(ax: Axes, labels: Sequence[str], *, along: str = "y") -> None:
    """Ticks that name rows (or, along "x", columns); only every so many where they would touch."""
    inches = _inches(ax)[1 if along == "y" else 0]
    # Side by side, labels need room for their letters rather than for a line.
    step = _step(len(labels), inches if along == "y" else inches / (0.6 + 0.45 * max(map(len, labels))))
    places = range(0, len(labels), step)
    chosen = [labels[place] for place in places]
    (ax.set_yticks if along == "y" else ax.set_xticks)(places, chosen, fontsize=8.5, **plain())


def quiet_frame(ax: Axes) -> None:
    """Axes without a box: only the two lines that carry ticks."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#e3e3e3", linewidth=0.7)
    ax.set_axisbelow(True)


def spread(values: np.ndarray, *, centred: bool = False, tail: str = "") -> Normalize:
    """The range of colours for some values; never empty.

    Args:
        values: one number a cell.
        centred: whether 0 is in the middle, because the sign matters.
        tail: "low" or "high", where the outermost twentieth of the values may lie beyond the range, so that a few
            extreme cells do not take all the colours.
    """
    finite = values[np.isfinite(values)]
    if centred:
        limit = float(np.abs(finite).max(initial=0.0)) or 1.0
        return Normalize(-limit, limit)
    ends = {"low": (5, 100), "high": (0, 95)}.get(tail, (0, 100))
    low, high = map(float, np.percentile(finite, ends)) if finite.size else (0.0, 1.0)
    return Normalize(low, high) if low < high else Normalize(low - 0.5, high + 0.5)


def _inches(ax: Axes) -> tuple[float, float]:
    box = ax.get_position()
    width, height = ax.figure.get_figure(root=True).get_size_inches()
    return float(box.width * width), float(box.height * height)


def _step(count: int, inches: float) -> int:
    """Every how many labels to show, so that each has a line's height of room."""
    return max(1, math.ceil(count * 0.14 / max(inches, 0.1)))


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")


@lru_cache(maxsize=8)
def _letters(own: tuple[str, ...]) -> tuple[tuple[str, ...], frozenset[int]]:
    """The font families to set tokens in, and every letter that they have, in regular and in bold."""
    installed = {font.name for font in font_manager.fontManager.ttflist}
    chosen = (*own, *(family for family in _FALLBACKS if family in installed and family not in own))
    letters: set[int] = set()
    for family in chosen:
        files = [
            font_manager.findfont(font_manager.FontProperties(family=family, weight=weight))
            for weight in ("normal", "bold")
        ]
        regular, bold = (set(font_manager.get_font(file).get_charmap()) for file in files)
        letters |= regular & bold
    return chosen, frozenset(letters)
