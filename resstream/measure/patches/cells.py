"""The grid of a patching sweep: which sites, layers, heads and positions, each combination a cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeAlias

import numpy as np

from resstream.errors import SiteError, listed
from resstream.measure.patches.columns import Columns
from resstream.measure.patches.pairs import Pairs
from resstream.models.trunk import ResidualModel
from resstream.sites import INSIDE, KINDS, Site, layers_from

Choice: TypeAlias = "str | int | Sequence[int]"


@dataclass(frozen=True)
class Cell:
    """One combination, as places along the axes of the grid, and what it patches there.

    Attributes:
        place: index along (site, layer, part, position).
        sites: the sites that are patched together.
        column: which choice of positions.
    """

    place: tuple[int, int, int, int]
    sites: tuple[Site, ...]
    column: int


@dataclass(frozen=True)
class Cells:
    """What a sweep patches.

    Attributes:
        kinds: kinds of site.
        layers: the layers.
        spans: for each of them, the layers that are patched together.
        parts: heads or neurons, each on its own; None stands for all at once.
        part: what the parts are, "head" or "neuron"; None where a site has none.
        columns: choices of positions, each on its own.
    """

    kinds: tuple[str, ...]
    layers: tuple[int, ...]
    spans: tuple[tuple[int, ...], ...]
    parts: tuple[int | None, ...]
    part: str | None
    columns: Columns

    @classmethod
    def of(
        cls,
        model: ResidualModel,
        pairs: Pairs,
        *,
        sites: str | Sequence[str],
        layers: Choice,
        window: int,
        heads: Choice,
        neurons: Choice,
        positions: Any,
    ) -> Cells:
        """Read what a user asks for, and check it against model and prompts.

        Raises:
            SiteError: no such site, layer, head or neuron, or kinds of site that do not share their axes.
            PromptError: no such position.
        """
        kinds = _kinds(model, sites)
        chosen = tuple(dict.fromkeys(layers_from(layers, n_layers=model.n_layers, model=model.name)))
        if not chosen:
            raise SiteError('no layers to patch; write layers="each" or a list such as [0, 5]')
        part = _part_of(kinds[0])
        asked = {"head": heads, "neuron": neurons}
        for name, choice in asked.items():
            if name != part and choice != _DEFAULT[name]:
                raise SiteError(f"{name}s={choice!r} needs sites that have {name}s; got {listed(kinds)}")
        parts = (None,) if part is None else _parts(model, kinds, part, asked[part])
        columns = Columns.of(pairs.clean, positions)
        return cls(kinds, chosen, _spans(model, chosen, window), parts, part, columns)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Lengths of the axes (site, layer, part, position)."""
        return len(self.kinds), len(self.layers), len(self.parts), len(self.columns)

    @property
    def whole(self) -> list[Site]:
        """Every site that is patched, with all its parts."""
        used = sorted({layer for span in self.spans for layer in span})
        return [Site(layer, kind) for layer in used for kind in self.kinds]

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of the axes that a result has; those along which all is patched at once are left out."""
        names = {
            "site": True,
            "layer": True,
            self.part or "": self.parts != (None,),
            "position": not self.columns.together,
        }
        return tuple(name for name, kept in names.items() if kept)

    def each(self, model: ResidualModel) -> Iterator[Cell]:
        """All cells; the last heads are left out of sites that have fewer, such as keys and values."""
        kinds, layers, parts, columns = map(range, self.shape)
        for place in product(kinds, layers, parts, columns):
            kind, part = self.kinds[place[0]], self.parts[place[2]]
            if part is None or part < model.parts[kind]:
                sites = tuple(Site(layer, kind, part) for layer in self.spans[place[1]])
                yield Cell(place, sites, place[3])

    def take(self, pairs: Sequence[int]) -> Cells:
        """The same cells of some of the pairs, in this order."""
        return replace(self, columns=self.columns.take(pairs))

    def squeeze(self, grid: np.ndarray) -> np.ndarray:
        """A grid whose last axes are (site, layer, part, position) without the axes that `dims` leaves out."""
        gone = [axis for axis, one in ((-2, self.parts == (None,)), (-1, self.columns.together)) if one]
        return grid.squeeze(tuple(gone)) if gone else grid

    def coords(self, pairs: Pairs) -> dict[str, Any]:
        """Labels of the axes, and the tokens that stand at the positions in both runs."""
        coords: dict[str, Any] = {
            "prompt": np.arange(len(pairs)),
            "length": ("prompt", np.array(pairs.clean.lengths)),
            "site": list(self.kinds),
            "layer": list(self.layers),
        }
        if self.part is not None and self.parts != (None,):
            coords[self.part] = list(self.parts)
        return coords | self.columns.coords(pairs)


_DEFAULT = {"head": "each", "neuron": "all"}


def _kinds(model: ResidualModel, sites: str | Sequence[str]) -> tuple[str, ...]:
    kinds = [sites] if isinstance(sites, str) else list(sites)
    for kind in kinds:
        if kind not in (*KINDS, *INSIDE):
            raise SiteError(
                f'sites="{kind}" is not a kind of place to patch; choose from {listed((*KINDS, *INSIDE))}, '
                "and say which layers with layers=[...]"
            )
        model.site(Site(0, kind))
    if not kinds:
        raise SiteError(f"no sites to patch; choose from {listed((*KINDS, *INSIDE))}")
    if len({_part_of(kind) for kind in kinds}) > 1:
        raise SiteError(
            f"sites={kinds} do not share their axes: some have heads or neurons, others not; ask for them in two calls"
        )
    return tuple(dict.fromkeys(kinds))


def _part_of(kind: str) -> str | None:
    return None if kind in KINDS else "neuron" if kind == "neuron" else "head"


def _parts(model: ResidualModel, kinds: Sequence[str], part: str, asked: Choice) -> tuple[int | None, ...]:
    for kind in kinds:
        model.require_inside(kind)
    count = max(model.parts[kind] for kind in kinds)
    if isinstance(asked, str):
        if asked not in ("each", "all"):
            raise SiteError(
                f'{part}s="{asked}" is not a choice of {part}s; write "each", "all" or a list such as [0, 3]'
            )
        return tuple(range(count)) if asked == "each" else (None,)
    numbers = [asked] if isinstance(asked, int) else list(dict.fromkeys(asked))
    for number in numbers:
        if not 0 <= number < count:
            raise SiteError(f"no {part} {number}: {model.name} has {part}s 0-{count - 1} at {listed(kinds)}")
    if not numbers:
        raise SiteError(f'no {part}s to patch; write {part}s="each", "all" or a list such as [0, 3]')
    return tuple(numbers)


def _spans(model: ResidualModel, layers: Sequence[int], window: int) -> tuple[tuple[int, ...], ...]:
    if window < 1:
        raise SiteError(f"window={window} patches no layer; write 1 for each layer alone, or a larger number of layers")
    starts = [layer - (window - 1) // 2 for layer in layers]
    return tuple(tuple(range(max(0, start), min(model.n_layers, start + window))) for start in starts)
