"""The panels that a picture of patching is put together from: a map of layers, a profile of them, the largest cells."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from resstream.plots.canvas import (
    BLUE,
    DIVERGING,
    GREEN,
    GREY,
    ORANGE,
    RED,
    SEQUENTIAL,
    cell_number,
    heatmap,
    plain,
    quiet_frame,
    row_ticks,
    token_ticks,
    write_cells,
)
from resstream.plots.effect_grids import Grid, largest, strongest_positions

MOST = 12
_LOOKS = ((BLUE, "-", "o"), (ORANGE, "--", "s"), (GREEN, "-.", "^"), (RED, ":", "D"), (GREY, "-", "v"))
_KEYS = ("k", "v")


@dataclass(frozen=True)
class Panel(ABC):
    """One panel of a picture.

    Attributes:
        grid: what it shows.
    """

    grid: Grid

    @property
    @abstractmethod
    def size(self) -> tuple[float, float]:
        """Width and height that it wants, in inches."""

    @property
    @abstractmethod
    def about(self) -> str:
        """What it shows, in words."""

    @abstractmethod
    def draw(self, ax: Axes) -> AxesImage | None:
        """Draw it; an image still needs a bar that says what its colours mean."""


@final
@dataclass(frozen=True)
class LayerMap(Panel):
    """Layers over positions, or over heads or neurons; these with the position at which each is strongest.

    Attributes:
        grid: of one kind of site.
        norm: the range of colours.
        written: whether values that are not small are written into their cells.
    """

    norm: Normalize
    written: bool

    @property
    def size(self) -> tuple[float, float]:
        """Room for tokens, or for numbers, in each column."""
        rows, columns = self.grid.values.shape[1:3]
        wide = 0.56 if self.grid.part is None else 0.8 if self.grid.columns else 0.42
        return 2.4 + wide * columns, 1.9 + 0.22 * max(rows, 11)

    @property
    def about(self) -> str:
        """The kind of site, and at which positions."""
        (site,), part = self.grid.sites, self.grid.part
        what = site if part is None else f"each {part}" if site == part else f"{site} of each {part}"
        strongest = "at the position where it is strongest" if part and self.grid.columns else ""
        return f"{what} {strongest or self.grid.spelled_where}".rstrip()

    def draw(self, ax: Axes) -> AxesImage:
        """Draw the map."""
        grid, part = self.grid, self.grid.part
        cells, places = strongest_positions(grid) if part and grid.columns else (grid.values, None)
        values = cells.isel(site=0).values
        cmap, lines = (DIVERGING, "#e9e9e9") if grid.signed else (SEQUENTIAL, "white")
        image = heatmap(ax, values, cmap=cmap, norm=self.norm, label=None, grid=lines)
        if self.written:
            # A diverging map loses its sign in grey, so the cells that matter say it in figures.
            large = np.abs(values) >= (grid.faint and grid.faint * self.norm.vmax)  # type: ignore[operator]
            texts = np.vectorize(cell_number, otypes=[object])(values)
            if places is not None:
                texts = texts + "@" + np.array(grid.short, dtype=object)[places.isel(site=0).values]
            write_cells(image, np.where(large, texts, ""))
        row_ticks(ax, [str(layer) for layer in grid.values.layer.values])
        ax.set_ylabel("layer")
        if part is None:
            token_ticks(ax, grid.columns)
            ax.set_xlabel("token that was patched (clean→corrupted where they differ)")
            return image
        row_ticks(ax, [str(number) for number in grid.values[part].values], along="x")
        absent = np.flatnonzero(np.isnan(values).all(0))
        for column in absent:
            ax.add_patch(
                Rectangle((column - 0.5, -0.5), 1, len(values), facecolor="white", edgecolor="#b5b5b5", hatch="///")
            )
        name = f"key/value {part}" if grid.sites[0] in _KEYS else part
        ax.set_xlabel(f"{name} (hatched: there is none)" if len(absent) else name)
        return image


@final
@dataclass(frozen=True)
class Profile(Panel):
    """The effect over layers, a line for each kind of site, with the interval over pairs as a band."""

    @property
    def size(self) -> tuple[float, float]:
        """A wide one."""
        return 8.0, 3.8

    @property
    def about(self) -> str:
        """The kinds of site, and at which positions."""
        band = "; bands: 95% intervals" if self.grid.ends else ""
        return f"{', '.join(self.grid.sites)} {self.grid.spelled_where}{band}"

    def draw(self, ax: Axes) -> None:
        """Draw the lines."""
        grid = self.grid
        layers = grid.values.layer.values
        for number, site in enumerate(grid.sites):
            colour, style, marker = _LOOKS[number % len(_LOOKS)]
            look: dict[str, Any] = {"color": colour, "linestyle": style, "marker": marker, "markersize": 3.5}
            ax.plot(layers, grid.values.sel(site=site).values, label=site, zorder=3, **look)
            if grid.ends:
                low, high = (end.sel(site=site).values for end in grid.ends)
                ax.fill_between(layers, low, high, color=colour, alpha=0.18, linewidth=0)
        if grid.signed:
            ax.axhline(0, color="black", linewidth=0.8)
            ax.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
        quiet_frame(ax)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlabel("layer")
        ax.set_ylabel(grid.label, **plain())
        if len(grid.sites) > 1:
            ax.legend(frameon=False)


@final
@dataclass(frozen=True)
class Largest(Panel):
    """The cells with the largest effects, with the interval over pairs as a line through each."""

    @property
    def size(self) -> tuple[float, float]:
        """A line of text for each cell."""
        return 7.6, 1.5 + 0.27 * MOST

    @property
    def about(self) -> str:
        """What is listed."""
        lines = "; lines: 95% intervals" if self.grid.ends else ""
        sites = ", ".join(f"{site}s" if site == self.grid.part else site for site in self.grid.sites)
        return f"largest effects of {sites} {self.grid.spelled_where}".rstrip() + lines

    def draw(self, ax: Axes) -> None:
        """Draw a point for each cell, the largest on top."""
        cells = largest(self.grid, MOST)
        for number, site in enumerate(self.grid.sites):
            colour, _, marker = _LOOKS[number % len(_LOOKS)]
            rows = [row for row, cell in enumerate(cells) if cell.site == site]
            values = [cells[row].value for row in rows]
            if self.grid.ends:
                ax.hlines(rows, *zip(*(cells[row].ends for row in rows), strict=True), color=colour, linewidth=1.4)
            ax.plot(values, rows, marker, color=colour, markersize=5.5, label=site, zorder=3)
        ax.axvline(0, color="black", linewidth=0.8)
        ax.set_ylim(len(cells) - 0.4, -0.6)
        ax.set_yticks(range(len(cells)), [cell.name for cell in cells], fontsize=8.5, **plain())
        ax.xaxis.set_major_locator(MaxNLocator(6))
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="both", color="#e3e3e3", linewidth=0.7)
        ax.set_axisbelow(True)
        ax.set_xlabel(self.grid.label, **plain())
        ax.set_ylabel("cell")
        if len(self.grid.sites) > 1:
            ax.legend(frameon=False, fontsize=8.5)
