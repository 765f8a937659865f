"""Direct paths: what writes that were changed bring to the places above them, while what lies between is held fixed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal, TypeAlias, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from resstream.models.carry import UNCHANGED
from resstream.models.trunk import ResidualModel, Trunk
from resstream.sites import Site
from resstream.stream.memory import peak_bytes
from resstream.stream.parts import part_of
from resstream.stream.rows import Base
from resstream.stream.run import TOKENS_PER_CHUNK

Item = TypeVar("Item")
Frozen: TypeAlias = Literal["all", "attn"]

_PROBE = 4


@dataclass(frozen=True)
class Move:
    """Writes of one run that take the value that they have in another.

    Attributes:
        target: the run that changes, as a prompt of the base run.
        donor: the run that the values are taken from.
        sites: writes, heads, or the first "resid_pre", which is what the embedding writes.
    """

    target: int
    donor: int
    sites: tuple[Site, ...]


@dataclass(frozen=True)
class DirectPaths:
    """Some moves, and what arrives of each at every branch above, in a stream in which other writes stay as they were.

    Where the trunk does something to the stream itself, x <- after(before(x) + writes), that is done anew to the stream
    as it arrives, with the writes as they were; what arrives above is the difference from the same without the move.
    Everything on the way acts on each position alone, so a move at some positions only is this one at those positions.

    Attributes:
        model: the model.
        base: both runs of each move, with the values at `kept_for_paths`.
        moves: the moves, a row each.
        frozen: "all", or "attn" to let the MLPs between read what arrives, and write anew.
        start: the first position that is run; before it the two runs of each move are the same.
        memory: most bytes to take at once for a branch.
    """

    model: ResidualModel
    base: Base
    moves: Sequence[Move]
    frozen: Frozen
    start: int
    memory: int
    opened: dict[tuple[int, ...], Trunk] = field(default_factory=dict, compare=False)

    def arrivals(self, until: int) -> Iterator[tuple[int, Float[Tensor, "move suffix d_model"]]]:
        """How much each move changes the stream that a step reads, step by step up to one of them.

        Args:
            until: the stage of the last place that is read, as in `stage_of`.
        """
        embed = Site(0, "resid_pre")
        change = self._written(embed, torch.zeros_like(self._own(embed, range(len(self.moves)))))
        for number, step in enumerate(self.model.steps[:until]):
            yield number, change
            written = sum((self._written(site, change) for site in step), torch.zeros_like(change))
            change = self._past(step, change, written)
        yield until, change

    def _past(self, step: tuple[Site, ...], change: Tensor, written: Tensor) -> Tensor:
        """How much the stream after a step changes, when the one before it and what is written change by so much."""
        carry = self.model.carry(step)
        if carry == UNCHANGED:
            return change + written
        after = torch.zeros_like(change)
        moving = [number for number in range(len(self.moves)) if change[number].any() or written[number].any()]
        for some in batches(moving, self.rows_at_once):
            x = self._own(self._input(step[0]), some)
            writes = sum((self._own(site, some) for site in step), torch.zeros_like(x))
            # Both by the same arithmetic, so that where nothing arrives the difference is nothing, bit for bit.
            after[some] = carry.add(x + change[some], writes + written[some]) - carry.add(x, writes)
        return after

    def received(
        self, sites: Sequence[Site], numbers: Sequence[int], change: Float[Tensor, "row suffix d_model"]
    ) -> dict[Site, Float[Tensor, "row pos ..."]]:
        """What is found at some places when the stream that they read is changed; left of the start it is zero.

        Args:
            sites: places in one branch, its write, or the last "resid_post".
            numbers: for each row, its move.
            change: how much its stream is changed.
        """
        site = sites[0]
        if site.kind == "resid_post":
            return {site: self._full(self._own(site, numbers) + change)}
        inside = {each.kind for each in sites if each.is_inside}
        found = self._read(Site(site.layer, site.branch), numbers, change, inside)
        return {each: self._full(part_of(found[each.kind], each)) for each in sites}

    def _read(
        self, site: Site, numbers: Sequence[int], change: Tensor, inside: Iterable[str] = ()
    ) -> dict[str, Tensor]:
        """What a branch writes, and has inside, when it reads a changed stream, by kind of site."""
        found: dict[str, Tensor] = {}
        keeping = {kind: partial(found.setdefault, kind) for kind in inside}
        x, trunk = self._own(self._input(site), numbers) + change, self._trunk(numbers)
        found[site.kind] = trunk.write(site, x, keeping) if keeping else trunk.write(site, x)
        return found

    @cached_property
    def rows_at_once(self) -> int:
        """How many rows a branch may read together, as the first attention shows on a few of them."""
        width = self.base.tokens.width - self.start
        numbers = [place % len(self.moves) for place in range(_PROBE)]
        change = torch.zeros_like(self._own(Site(0, "resid_pre"), numbers))
        taken = peak_bytes(lambda: self._read(self.model.steps[0][0], numbers, change))
        return max(1, min(TOKENS_PER_CHUNK // width, self.memory * _PROBE // taken))

    def _written(self, site: Site, change: Tensor) -> Tensor:
        """How much more a branch, or the embedding, writes in each move than in its target's own run."""
        written = torch.zeros_like(change)
        for numbers, more in (*self._anew(site, change), *self._by_heads(site), *self._by_donor(site)):
            written[numbers] = more
        return written

    def _anew(self, site: Site, change: Tensor) -> Iterator[tuple[list[int], Tensor]]:
        """What an MLP that is not frozen writes more where it reads what arrives."""
        if self.frozen == "attn" and site.kind == "mlp":
            reached = [number for number in range(len(self.moves)) if change[number].any()]
            for some in batches(reached, self.rows_at_once):
                new = self._read(site, some, change[some])["mlp"]
                yield some, (new - self._own(site, some)).where((change[some] != 0).any(-1, keepdim=True), 0)

    def _by_heads(self, site: Site) -> Iterator[tuple[list[int], Tensor]]:
        """What attention writes more when some heads have the donor's value, by its own projection and post-norm."""
        heads = [
            [head for head in move.sites if head.kind == "head" and Site(head.layer, head.branch) == site]
            for move in self.moves
        ]
        z = Site(site.layer, "z")
        for some in batches([number for number, each in enumerate(heads) if each], self.rows_at_once):
            own, other = self._own(z, some), self._own(z, some, "donor")
            new = own.clone()
            for place, number in enumerate(some):
                for head in heads[number]:
                    part = slice(None) if head.part is None else head.part
                    new[place, :, part] = other[place, :, part]
            x, trunk = self._own(self._input(site), some), self._trunk(some)
            after, before = (trunk.write(site, x, {"z": _always(value)}) for value in (new, own))
            yield some, (after - before).where((new != own).flatten(2).any(-1, keepdim=True), 0)

    def _by_donor(self, site: Site) -> Iterator[tuple[list[int], Tensor]]:
        """What a sender writes more in the donor's run."""
        moved = [number for number, move in enumerate(self.moves) if site in move.sites]
        if moved:
            yield moved, self._own(site, moved, "donor") - self._own(site, moved)

    def _input(self, site: Site) -> Site:
        """The state that a branch reads."""
        middle = site.kind == "mlp" and self.model.layout == "sequential"
        return Site(site.layer, "resid_mid" if middle else "resid_pre")

    def _own(self, site: Site, numbers: Iterable[int], run: Literal["target", "donor"] = "target") -> Tensor:
        """What the runs of some moves have at a site, from the first position that is run."""
        prompts = [getattr(self.moves[number], run) for number in numbers]
        return self.base.values[site][prompts, self.start :]

    def _full(self, value: Float[Tensor, "row suffix ..."]) -> Float[Tensor, "row pos ..."]:
        """A value at all positions of the prompt."""
        return torch.cat([value.new_zeros(len(value), self.start, *value.shape[2:]), value], dim=1)

    def _trunk(self, numbers: Sequence[int]) -> Trunk:
        """The trunk for a batch; the last few are kept, since batches change only where moves join."""
        prompts = tuple(self.moves[number].target for number in numbers)
        if prompts not in self.opened:
            if len(self.opened) > 2:
                self.opened.pop(next(iter(self.opened)))
            tokens, left = self.base.tokens.take(prompts), self.base.left
            kept = left.take(prompts, until=self.start) if left is not None and self.start else None
            self.opened[prompts] = self.model.trunk(tokens, left=kept) if kept is not None else self.model.trunk(tokens)
        return self.opened[prompts]


def stage_of(model: ResidualModel, site: Site) -> int:
    """How far up a place is: the step that it is part of; the embedding lies before the first, the readout after all.

    >>> import resstream as rs
    >>> model = rs.load("smollm2")
    >>> [stage_of(model, model.site(name)) for name in ("embed", "0.attn", "0.mlp", "5.q.3", "final")]
    [-1, 0, 1, 10, 60]
    """
    if site == Site(0, "resid_pre"):
        return -1
    if site == Site(model.n_layers - 1, "resid_post"):
        return len(model.steps)
    return site.layer if model.layout == "parallel" else 2 * site.layer + (site.branch == "mlp")


def kept_for_paths(model: ResidualModel, senders: Iterable[Site], frozen: Frozen) -> list[Site]:
    """The values that a base run must keep, so that these senders' direct paths can be followed from it.

    >>> import resstream as rs
    >>> model = rs.load("smollm2")
    >>> [str(site) for site in kept_for_paths(model, [model.site("5.head.3")], "all")][:3]
    ['5.z', '0.resid_mid', '1.resid_mid']
    """
    own = [Site(site.layer, "z") if site.kind == "head" else site for site in senders]
    middles = [Site(layer, "resid_mid") for layer in range(model.n_layers) if model.layout == "sequential"]
    mlps = [Site(layer, "mlp") for layer in range(model.n_layers) if frozen == "attn"]
    carried = [site for step in model.carried for site in step]
    return list(dict.fromkeys([*own, *middles, *mlps, *carried]))


def batches(items: Sequence[Item], size: int) -> Iterator[list[Item]]:
    """Some items, so many at a time.

    >>> list(batches([1, 2, 3], 2))
    [[1, 2], [3]]
    """
    for start in range(0, len(items), size):
        yield list(items[start : start + size])


def _always(value: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda _: value
