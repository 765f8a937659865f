"""The rows of a path-patching sweep: for each sender, receiver and choice of positions, a run with one value put in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from resstream.measure.patches.endpoints import End
from resstream.measure.patches.pairs import Direction, Pairs
from resstream.measure.patches.transplant import after_write, moved
from resstream.models.trunk import ResidualModel
from resstream.sites import Site
from resstream.stream.direct import DirectPaths, Frozen, Move, batches, stage_of
from resstream.stream.rows import Base, Put, Row

Cell: TypeAlias = tuple[int, int, int, int]

# What they have at a position depends on positions further left, so each choice of positions needs a run of its own.
_MIXING = ("attn", "z")


@dataclass(frozen=True)
class PathRows:
    """The cells of some pairs of one length.

    Attributes:
        model: the model that runs.
        base: both runs of every pair, with what `kept_for_paths` lists and each receiver that is a whole write.
        pairs: the pairs.
        masks: for each choice of positions, where senders are moved.
        senders, receivers: the ends of the paths.
        direction: which of the two runs is patched.
        frozen: what is held fixed between sender and receiver.
        memory: most bytes to take at once.
    """

    model: ResidualModel
    base: Base
    pairs: Pairs
    masks: Bool[Tensor, "column pair pos"]
    senders: Sequence[End]
    receivers: Sequence[End]
    direction: Direction
    frozen: Frozen
    memory: int

    @property
    def at_once(self) -> int:
        """How many rows fit the memory, with what is put into them."""
        return max(1, self.memory // (self.base.final[0].nbytes * max(map(len, self.receivers))))

    def __iter__(self) -> Iterator[tuple[Cell, Row]]:
        """Every cell that a path leads to, as its place along (pair, sender, receiver, column), and its row."""
        first = min(map(self.pairs.first_difference, range(len(self.pairs))))
        start = min(first, self.pairs.clean.width - 1) if self.base.left is not None else 0
        # A few streams a move are alive at a time.
        size = max(1, self.memory // (4 * self.base.final[0].nbytes))
        below = [number for number, end in enumerate(self.senders) if self._lowest(end) < self._top]
        for some in batches(list(product(range(len(self.pairs)), below)), size):
            moves = [Move(*self.pairs.sides(pair, self.direction), self.senders[sender]) for pair, sender in some]
            yield from self._of_moves(DirectPaths(self.model, self.base, moves, self.frozen, start, self.memory), some)

    @property
    def _top(self) -> int:
        """The stage of the highest receiver."""
        return max(stage_of(self.model, site) for end in self.receivers for site in end)

    def _lowest(self, sender: End) -> int:
        """The stage of a sender's lowest write."""
        return min(stage_of(self.model, site) for site in sender)

    def _of_moves(self, paths: DirectPaths, ends: Sequence[tuple[int, int]]) -> Iterator[tuple[Cell, Row]]:
        """The rows of some moves, each as soon as all that its receiver reads has arrived."""
        waiting: dict[Cell, dict[Site, Put | None]] = {}
        for cell, number, site, put in self._arriving(paths, ends):
            puts = waiting.setdefault(cell, {})
            puts[site] = put
            lowest = self._lowest(paths.moves[number].sites)
            if len(puts) == sum(stage_of(self.model, each) > lowest for each in self.receivers[cell[2]]):
                yield cell, self._row(paths.moves[number].target, waiting.pop(cell))

    def _arriving(
        self, paths: DirectPaths, ends: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[Cell, int, Site, Put | None]]:
        """What is put at each site of each receiver, with the cell and the move that it belongs to, from below."""
        lowest = [self._lowest(move.sites) for move in paths.moves]
        for stage, change in paths.arrivals(self._top):
            reached = [number for number, low in enumerate(lowest) if low < stage]
            for sites in self._read_together(stage):
                for number, column, site, put in self._puts(paths, sites, reached, change, ends):
                    for receiver in [place for place, end in enumerate(self.receivers) if site in end]:
                        yield (*ends[number], receiver, column), number, site, put

    def _read_together(self, stage: int) -> list[list[Site]]:
        """The receivers of one step, those together that one run of a branch shows."""

        def run(site: Site) -> tuple[str, bool]:
            return ("" if site.kind == "resid_post" else site.branch), moved(site).kind in _MIXING

        sites = dict.fromkeys(s for end in self.receivers for s in end if stage_of(self.model, s) == stage)
        return [list(some) for _, some in groupby(sorted(sites, key=run), key=run)]

    def _puts(
        self,
        paths: DirectPaths,
        sites: Sequence[Site],
        reached: Sequence[int],
        change: Float[Tensor, "move suffix d_model"],
        ends: Sequence[tuple[int, int]],
    ) -> Iterator[tuple[int, int, Site, Put | None]]:
        """What is put at some receivers, by move and column; None where nothing arrives."""
        mixing = moved(sites[0]).kind in _MIXING
        arrives = torch.zeros_like(self.masks[0, [pair for pair, _ in ends]])
        arrives[:, paths.start :] = (change != 0).any(-1)
        work: dict[tuple[int, int], list[int]] = {}
        for number, column in product(reached, range(len(self.masks))):
            here = self.masks[column, ends[number][0]]
            if bool((here & arrives[number]).any()):
                work.setdefault((number, column if mixing else 0), []).append(column)
            elif bool(here.any()):
                yield from ((number, column, site, None) for site in sites)
        for some in batches(list(work), paths.rows_at_once):
            numbers = [number for number, _ in some]
            moving = change[numbers]
            if mixing:
                masks = torch.stack([self.masks[column, ends[number][0]] for number, column in some])
                moving = moving * masks[:, paths.start :, None]
            values = paths.received([moved(site) for site in sites], numbers, moving)
            for row, (number, key) in enumerate(some):
                for column, site in product(work[number, key], sites):
                    where = self.masks[column, ends[number][0]] & arrives[number]
                    where = where.cumsum(0) > 0 if mixing else where
                    yield number, column, site, Put(values[moved(site)][row], where)

    def _row(self, target: int, puts: dict[Site, Put | None]) -> Row:
        """The target's run with what is put at a receiver; its own run where nothing is."""
        some = {site: put for site, put in puts.items() if put is not None}
        if not some:
            return Row(target, Site(0, "resid_pre"))
        site, put = next(iter(some.items()))
        # Where the trunk acts on what is written, the difference of two writes is not that of the streams after them.
        if len(some) == 1 and not site.is_inside and not (site.is_write and self.model.carried):
            enter = after_write(self.model, site) if site.is_write else site
            own, before = self.base.values[site][target], self.base.values[enter][target]
            return Row(target, enter, lambda: Put(before + (put.value - own), put.where).over(before))
        enter = Site(min(site.layer for site in some), "resid_pre")
        return Row(target, enter, change={moved(site): put for site, put in some.items()})
