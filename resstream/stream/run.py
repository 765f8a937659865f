"""The one executor: many variants of a forward pass as rows of one batch that grows on its way up the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from resstream.models.trunk import Inside, ResidualModel, Trunk
from resstream.sites import INSIDE, Site
from resstream.stream.memory import peak_bytes
from resstream.stream.rows import Base, Put, Row, depth

Score: TypeAlias = Callable[[Tensor, Sequence[int]], Tensor]

# What rows may take at once unless a measure is told otherwise, in bytes.
MEMORY = 2**30

# Wide enough to keep matrix products busy; wider batches only leave the processor's caches.
TOKENS_PER_CHUNK = 4096

# What a layer costs whatever its batch, counted in tokens that it could take along for the same time.
_TOKENS_PER_CALL = 40
_PROBE = 4


def run(
    model: ResidualModel,
    base: Base,
    rows: Sequence[Row],
    scores: Sequence[Score],
    baseline: Float[Tensor, "prompt score"],
    *,
    memory: int = MEMORY,
    progress: str | None = None,
) -> Float[Tensor, "row score"]:
    """Run every row from where it enters to the end, and score what comes out.

    Nothing below a row's entry is run again, nor anything left of the first position at which it differs, where the
    model can reuse what the base run has there. A row that enters with a stream that some base run already has, and
    changes nothing later, is that run: it gets its score, bit for bit, and is not run at all.

    Args:
        model: the model whose trunk is run.
        base: the unedited run.
        rows: the variants, in any order.
        scores: functions from last residuals ("row pos d_model") and their prompts to one number a row.
        baseline: what they say of the base run, from `score_all`.
        memory: most bytes that rows may take at once; how many that is, is measured on a few of them.
        progress: a label, to show a progress bar; None shows none.
    Returns:
        The scores of each row, in the order given.
    """
    twins = [base.twin(row) for row in rows]
    waiting = [number for number, twin in enumerate(twins) if twin is None]
    known: dict[tuple[int, int], Tensor] = {}
    found = baseline.new_empty(len(rows), len(scores))
    with torch.no_grad(), model.running(), tqdm(total=len(rows), desc=progress, disable=progress is None) as bar:
        for number, (row, twin) in enumerate(zip(rows, twins, strict=True)):
            if twin is not None:
                if (row.prompt, twin) not in known:
                    known[row.prompt, twin] = _of_twin(base, scores, baseline, row.prompt, twin)
                found[number] = known[row.prompt, twin]
        bar.update(len(rows) - len(waiting))
        for chunk, start in _chunks(model, base, rows, waiting, memory):
            some = [rows[number] for number in chunk]
            found[chunk] = _score(scores, _Climb(model, base, some, start).final(), [row.prompt for row in some])
            bar.update(len(chunk))
    return found


def score_all(scores: Sequence[Score], base: Base) -> Float[Tensor, "prompt score"]:
    """The scores of the base run itself."""
    with torch.no_grad():
        return _score(scores, base.final, range(len(base.tokens)))


def _score(scores: Sequence[Score], final: Tensor, prompts: Sequence[int]) -> Tensor:
    return torch.stack([score(final, prompts).double() for score in scores], dim=1)


def _of_twin(base: Base, scores: Sequence[Score], baseline: Tensor, prompt: int, twin: int) -> Tensor:
    """The scores of a prompt whose run has become another's: that one's own, if no metric can tell them apart."""
    if prompt == twin:
        return baseline[twin]
    as_prompt, as_twin = (_score(scores, base.final[[twin]], [each])[0] for each in (prompt, twin))
    return torch.where(as_prompt == as_twin, baseline[twin], as_prompt)


def _chunks(
    model: ResidualModel, base: Base, rows: Sequence[Row], waiting: Sequence[int], memory: int
) -> Iterator[tuple[list[int], int]]:
    """Rows that are run together, by their numbers, and the first position that is run for them."""
    last = base.tokens.width - 1
    firsts = {number: min(base.first(rows[number]), last) if base.left is not None else 0 for number in waiting}
    for group, start in _groups(model, rows, firsts):
        group.sort(key=lambda number: depth(rows[number].enter))
        size = _rows_at_once(model, base, [rows[number] for number in group], start, memory)
        for begin in range(0, len(group), size):
            yield group[begin : begin + size], start


def _groups(model: ResidualModel, rows: Sequence[Row], firsts: Mapping[int, int]) -> Iterator[tuple[list[int], int]]:
    """Rows by the first position that they need; later ones join in where that costs less than a batch of their own."""
    group: list[int] = []
    start = 0
    for first in sorted(set(firsts.values())):
        some = [number for number, own in firsts.items() if own == first]
        layers = [model.n_layers - rows[number].enter.layer for number in some]
        if group and sum(layers) * (first - start) > _TOKENS_PER_CALL * max(layers):
            yield group, start
            group = []
        if not group:
            start = first
        group += some
    if group:
        yield group, start


def _rows_at_once(model: ResidualModel, base: Base, rows: Sequence[Row], start: int, memory: int) -> int:
    """How many rows fit the memory, as a layer of a few of them shows."""
    most = max(1, TOKENS_PER_CHUNK // (base.tokens.width - start))
    some = [row.prompt for row in rows[: min(_PROBE, most)]]
    if len(rows) <= len(some):
        return most

    def layer() -> list[Tensor]:
        # What a chunk holds at once: its streams before and after a layer, and the final ones at full width.
        return [base.final[some], _trunk(model, base, some, start).layer(0, base.final[some, start:])]

    return max(1, min(most, memory * len(some) // max(1, peak_bytes(layer))))


def _trunk(model: ResidualModel, base: Base, prompts: Sequence[int], start: int) -> Trunk:
    tokens = base.tokens.take(prompts)
    if base.left is None or not start:
        return model.trunk(tokens)
    return model.trunk(tokens, left=base.left.take(prompts, until=start))


@dataclass
class _Climb:
    """Some rows, sorted by where they enter, on their way up the layers as one growing batch."""

    model: ResidualModel
    base: Base
    rows: Sequence[Row]
    start: int
    opened: dict[tuple[int, ...], Trunk] = field(default_factory=dict)

    def final(self) -> Float[Tensor, "row pos d_model"]:
        """The last residuals of all rows; left of the first position that was run they are the base run's."""
        joined, x = 0, self.base.final[:0, self.start :]
        for layer in range(self.rows[0].enter.layer, self.model.n_layers):
            entering = [
                row for row in self.rows[joined:] if row.enter.layer == layer and row.enter.kind != "resid_post"
            ]
            x = self._join(x, entering)
            joined += len(entering)
            if joined:
                x = self._layer(layer, self._put(Site(layer, "resid_pre"), x, range(joined)))
        x = self._put(
            Site(self.model.n_layers - 1, "resid_post"), self._join(x, self.rows[joined:]), range(len(self.rows))
        )
        left = self.base.final[[row.prompt for row in self.rows], : self.start]
        return torch.cat([left, x], dim=1) if self.start else x

    def _join(self, x: Tensor, entering: Sequence[Row]) -> Tensor:
        streams = [self.base.stream(row)[self.start :] for row in entering]
        return torch.cat([x, torch.stack(streams)]) if streams else x

    def _layer(self, layer: int, x: Tensor) -> Tensor:
        """One layer: whole for the rows that leave its writes as they are, write by write or not at all for others."""
        skipped = [number for number in self.skipped.get(layer, ()) if number < len(x)]
        parted = [number for number in self.in_steps.get(layer, ()) if number < len(x)]
        if not parted and not skipped:
            return self._whole(layer, x, range(len(x)))
        whole = sorted({*range(len(x))} - {*parted, *skipped})
        after = x.clone()
        if parted:
            after[parted] = self._in_steps(layer, x[parted], parted)
        if whole:
            after[whole] = self._whole(layer, x[whole], whole)
        return after

    def _whole(self, layer: int, x: Tensor, numbers: Sequence[int]) -> Tensor:
        inside = self._inside(layer, numbers)
        trunk = self._trunk(numbers)
        return trunk.layer(layer, x, inside) if inside else trunk.layer(layer, x)

    def _in_steps(self, layer: int, x: Tensor, numbers: Sequence[int]) -> Tensor:
        late = torch.tensor(
            [self.rows[number].enter == Site(layer, "resid_mid") for number in numbers], device=x.device
        )
        for step in [step for step in self.model.steps if step[0].layer == layer]:
            written = sum((self._write(site, x, numbers) for site in step), torch.zeros_like(x))
            after = self.model.carry(step).add(x, written)
            if step[-1].kind == "attn":
                # Rows that enter at the middle have it already.
                after = self._put(Site(layer, "resid_mid"), torch.where(late[:, None, None], x, after), numbers)
            x = after
        return x

    def _write(self, site: Site, x: Tensor, numbers: Sequence[int]) -> Tensor:
        """What a branch adds to each row: its own write, another that is put in its place, or nothing."""
        entered_above = Site(site.layer, "resid_mid") if site.kind == "attn" else None
        running = [
            place
            for place, number in enumerate(numbers)
            if self._runs(site, self.rows[number]) and self.rows[number].enter != entered_above
        ]
        written = torch.zeros_like(x)
        if running:
            some = [numbers[place] for place in running]
            inside = self._inside(site.layer, some, site.kind)
            trunk = self._trunk(some)
            written[running] = trunk.write(site, x[running], inside) if inside else trunk.write(site, x[running])
        return self._put(site, written, numbers)

    def _runs(self, site: Site, row: Row) -> bool:
        return site not in row.change or ((put := row.change[site]) is not None and put.where is not None)

    def _put(self, site: Site, x: Tensor, numbers: Sequence[int]) -> Tensor:
        """Put in place what rows change at a site of the stream."""
        changes = {number: put for number, _, put in self.changes.get(site, ()) if put is not None}
        if not changes:
            return x
        own = zip(numbers, x, strict=True)
        return torch.stack([changes[number].over(value) if number in changes else value for number, value in own])

    def _inside(self, layer: int, numbers: Sequence[int], branch: str | None = None) -> Inside | None:
        """What rows change inside a layer's branches, as functions of what the whole batch has there."""
        kinds = [Site(layer, kind) for kind in INSIDE if Site(layer, kind) in self.changes]
        chosen = [site for site in kinds if branch in (None, site.branch)]
        places = {number: place for place, number in enumerate(numbers)} if chosen else {}
        puts = {
            whole.kind: [(places[number], site, put) for number, site, put in self.changes[whole] if number in places]
            for whole in chosen
        }
        return {kind: _putting(some) for kind, some in puts.items() if some} or None

    @cached_property
    def changes(self) -> dict[Site, list[tuple[int, Site, Put | None]]]:
        """For each place, with all its parts, which rows change what there."""
        found: dict[Site, list[tuple[int, Site, Put | None]]] = {}
        for number, row in enumerate(self.rows):
            for site, put in row.change.items():
                found.setdefault(site.whole, []).append((number, site, put))
        return found

    @cached_property
    def in_steps(self) -> dict[int, list[int]]:
        """For each layer, the rows that run it write by write."""
        found: dict[int, list[int]] = {}
        for number, row in enumerate(self.rows):
            for layer in row.in_steps:
                found.setdefault(layer, []).append(number)
        return found

    @cached_property
    def skipped(self) -> dict[int, list[int]]:
        """For each layer, the rows that leave it out."""
        found: dict[int, list[int]] = {}
        for number, row in enumerate(self.rows):
            for layer in row.skip:
                found.setdefault(layer, []).append(number)
        return found

    def _trunk(self, numbers: Sequence[int]) -> Trunk:
        """The trunk for a batch of these rows; the last few are kept, since batches change only where rows join."""
        prompts = tuple(self.rows[number].prompt for number in numbers)
        if prompts not in self.opened:
            if len(self.opened) > 2:
                self.opened.pop(next(iter(self.opened)))
            narrowed = self.all.first(len(prompts)) if prompts == self.prompts[: len(prompts)] else None
            self.opened[prompts] = narrowed or _trunk(self.model, self.base, prompts, self.start)
        return self.opened[prompts]

    @cached_property
    def all(self) -> Trunk:
        """The trunk for all rows; as they join one after another, most batches are the first of them."""
        return _trunk(self.model, self.base, self.prompts, self.start)

    @cached_property
    def prompts(self) -> tuple[int, ...]:
        """The prompt of each row."""
        return tuple(row.prompt for row in self.rows)


def _putting(puts: Sequence[tuple[int, Site, Put | None]]) -> Callable[[Tensor], Tensor]:
    """A function that puts values into a batch: each into its own row and part, at its own positions."""

    def function(value: Tensor) -> Tensor:
        value = value.clone()
        for row, site, put in puts:
            # Only a pattern has its parts before its positions, which are its queries.
            pattern = site.kind == "pattern"
            own = value[row] if site.part is None else value[row].select(0 if pattern else 1, site.part)
            own.copy_(torch.zeros_like(own) if put is None else put.over(own, axis=own.ndim - 2 if pattern else 0))
        return value

    return function
