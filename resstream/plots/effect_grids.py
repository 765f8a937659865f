"""What a picture of patching is made from: a grid of effects for each metric, its labels, and its largest cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import xarray as xr

from resstream.plots.canvas import metric_of, prompts_of, spell, variable_of
from resstream.result import Result

PARTS = ("head", "neuron")
_FAINT = 0.15
_SIDES = {"denoise": ("restored", "as corrupted", "as clean"), "noise": ("removed", "as clean", "as corrupted")}


@dataclass(frozen=True)
class Grid:
    """The effects of one metric.

    Attributes:
        values: over (site, layer), then head or neuron, then position, as far as the result has them.
        ends: the low and the high ends of their intervals, where several pairs give one.
        label: what the values are, with their unit, and what 0 and 1 mean.
        signed: whether the sign matters, so that 0 is in the middle of the colours.
        faint: up to which part of the largest value one is small, and need not be written out.
        columns: a label for each position.
        short: the same as short as a cell needs it.
        where: which positions were patched, in words, where they are no axis.
        gap: the metric of both runs, in words.
    """

    values: xr.DataArray
    ends: tuple[xr.DataArray, xr.DataArray] | None
    label: str
    signed: bool
    faint: float
    columns: Sequence[str]
    short: Sequence[str]
    where: str
    gap: str

    @property
    def part(self) -> str | None:
        """What the sites are divided into, if they are: "head" or "neuron"."""
        return next((part for part in PARTS if part in self.values.dims), None)

    @property
    def sites(self) -> list[str]:
        """The kinds of site."""
        return [str(site) for site in self.values.site.values]

    @property
    def is_profile(self) -> bool:
        """Whether layers are its only axis."""
        return self.part is None and not self.columns

    @property
    def spelled_where(self) -> str:
        """Which positions, as they follow what was patched."""
        return f"at {self.where}" if self.where else ""

    def of(self, site: str) -> Grid:
        """The grid of one kind of site."""
        ends = self.ends and (self.ends[0].sel(site=[site]), self.ends[1].sel(site=[site]))
        return replace(self, values=self.values.sel(site=[site]), ends=ends)


@dataclass(frozen=True)
class Cell:
    """One cell of a grid.

    Attributes:
        site: its kind of site.
        name: where it is, such as "23.z.3 at ·to".
        value: its effect.
        ends: the ends of its interval, if it has one.
    """

    site: str
    name: str
    value: float
    ends: tuple[float, float] | None


def grids_of(result: Result, prompt: int | None) -> list[Grid]:
    """A grid for each metric, of one prompt or of the mean over all of them.

    Raises:
        ResultError: no such prompt, or a result without effects.
    """
    for name in ("effect", "mean_effect"):
        variable_of(result, name)
    data = prompts_of(result, prompt)
    if "metric_name" not in data.dims:
        return [_grid(result, data, prompt, 0)]
    return [_grid(result, data.isel(metric_name=number), prompt, number) for number in range(data.sizes["metric_name"])]


def largest(grid: Grid, count: int) -> list[Cell]:
    """The cells with the largest effects of either sign, the largest first."""
    values = grid.values.values.ravel()
    order = np.argsort(-np.abs(values), kind="stable")
    return [_cell(grid, number) for number in order[: min(count, int(np.isfinite(values).sum()))].tolist()]


def strongest_positions(grid: Grid) -> tuple[xr.DataArray, xr.DataArray]:
    """Of each head, the effect at the position where it is largest, whatever its sign, and which position that is."""
    place = abs(grid.values).fillna(-1.0).argmax("position")
    return grid.values.isel(position=place), place


def _grid(result: Result, data: xr.Dataset, prompt: int | None, number: int) -> Grid:
    """The grid of one metric; where it has no effect at all since both runs agree, the metric itself."""
    effect = data.mean_effect if prompt is None else data.effect.isel(prompt=0)
    ends = (data.effect_low, data.effect_high) if prompt is None and "effect_low" in data else None
    label, signed, faint = *_label(result), _FAINT
    name, units = metric_of(result, number)
    if not bool(effect.notnull().any()):
        effect, ends, signed, faint = data.metric.mean("prompt"), None, False, 0.0
        label = f"{name} ({units});\nno effect, since both runs agree"
    places = _places(data) if "position" in data.dims else []
    columns = [place[0] for place in places]
    where = "" if columns else "all positions"
    part = next((part for part in PARTS if part in effect.dims), None)
    if len(columns) == 1:
        where, columns, effect = columns[0], [], effect.isel(position=0)
        ends = ends and (ends[0].isel(position=0), ends[1].isel(position=0))
    order = [name for name in ("site", "layer", part, "position" if columns else None) if name is not None]
    clean, corrupted = float(data.clean.mean()), float(data.corrupted.mean())
    return Grid(
        values=effect.transpose(*order),
        ends=ends and (ends[0].transpose(*order), ends[1].transpose(*order)),
        label=label,
        signed=signed,
        faint=faint,
        columns=columns,
        short=[place[1] for place in places],
        where=where,
        gap=f"{name}: clean {clean:.2f}, corrupted {corrupted:.2f} {units}".replace(" -", " −"),
    )


def _label(result: Result) -> tuple[str, bool]:
    """What an effect is, and whether its sign says something."""
    direction = str(result.settings.get("direction", "denoise"))
    done, nothing, everything = _SIDES.get(direction, ("moved", "as it was", "all the way"))
    estimated = "estimated " if result.measure == "attribution_patching" else ""
    if "drop" in result.settings.get("fix", ()):
        return f"{estimated}size of the effect, as a share of the gap ({direction}):\nit has no sign", False
    return f"{estimated}share of the gap {done} ({direction}):\n0 {nothing}, 1 {everything}", True


def _places(data: xr.Dataset) -> list[tuple[str, str]]:
    """Two labels for each position, long and short: its token, or its name or number where prompts differ there."""
    labels = []
    for column, position in enumerate(data.position.values):
        here = data.isel(position=column)
        pairs = {(str(a), str(b)) for a, b in zip(here.token.values, here.corrupted_token.values, strict=True)}
        name = spell(position, 24) if isinstance(position, str) else ""
        if len(pairs) > 1:
            labels.append((name or f"position {int(position)}", name or str(int(position))))
            continue
        clean, corrupted = pairs.pop()
        both = spell(clean, 24) if clean == corrupted else f"{spell(clean, 16)}→{spell(corrupted, 16)}"
        labels.append((f"{name} ({both})" if name and position != clean else both, spell(clean, 16)))
    return labels


def _cell(grid: Grid, number: int) -> Cell:
    place = np.unravel_index(number, grid.values.shape)
    here = dict(zip(map(str, grid.values.dims), map(int, place), strict=True))
    site, layer = grid.sites[here["site"]], int(grid.values.layer[here["layer"]])
    part = f".{int(grid.values[grid.part][here[grid.part]])}" if grid.part else ""
    at = f" at {grid.columns[here['position']]}" if grid.columns else ""
    ends = grid.ends and (float(grid.ends[0].values[place]), float(grid.ends[1].values[place]))
    return Cell(site, f"{layer}.{site}{part}{at}", float(grid.values.values[place]), ends)
