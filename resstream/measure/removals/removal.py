"""Removal: running a model without some of its layers or writes, and what takes the place of those."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from resstream.errors import PromptError, SiteError, listed
from resstream.measure.labels import to_numpy
from resstream.models.carry import UNCHANGED
from resstream.models.tokens import Prompts, Tokens
from resstream.models.trunk import ResidualModel
from resstream.sites import Site
from resstream.stream.read import trace
from resstream.stream.run import TOKENS_PER_CHUNK, Score

How = Literal["skip", "zero", "mean", "resample"]

# What can be removed: a whole layer, by its number, or one of its branches, by its site.
Removable: TypeAlias = "int | Site"

# A step up the stream: what runs there, and which unit it is, if it is one. All its parts read the same state.
Stage: TypeAlias = "Sequence[tuple[Removable, int | None]]"


def stand_ins(
    model: ResidualModel, tokens: Tokens, reference: Prompts | None, units: Sequence[Removable], how: How, seed: int
) -> Sequence[Mapping[Removable, Tensor]]:
    """What is put in place of each unit's write, in each prompt of a batch.

    Args:
        model: the model whose writes are replaced.
        tokens: the prompts of the runs from which units are removed.
        reference: prompts that the mean is taken over, or another is drawn from; the prompts themselves if None.
        units: what may be removed.
        how: "skip" and "zero" put nothing there, "mean" the mean over all real tokens, "resample" another prompt's.
        seed: which prompts "resample" draws.
    Returns:
        For each prompt the write, "pos d_model" or "d_model", that replaces a unit's; without an entry, nothing does.
        A head is replaced through its z, "pos d_head" or "d_head"; a layer in which the trunk does something to the
        stream itself through each of its writes, so that what stands in for them goes the same way.
    Raises:
        PromptError: no reference prompt is long enough to resample from.
    """
    if how in ("skip", "zero"):
        return [{} for _ in range(len(tokens))]
    source = tokens if reference is None else model.tokenize(reference)
    writes = _writes(model, source, units)
    if how == "mean":
        # In float64, so that how prompts are batched cannot move the mean.
        means = {unit: write[source.mask].double().mean(dim=0).to(write) for unit, write in writes.items()}
        return [means] * len(tokens)
    donors = [_donor(seed, tokens, prompt, source, own=reference is None) for prompt in range(len(tokens))]
    return [{unit: _cut(write[donor], tokens.width) for unit, write in writes.items()} for donor in donors]


def steps_of(model: ResidualModel, layer: int) -> list[tuple[Site, ...]]:
    """The steps of one layer: its writes, grouped by what they read."""
    return [step for step in model.steps if step[0].layer == layer]


def writes_of(model: ResidualModel, layer: int) -> list[Site]:
    """The writes of one layer, in the order in which they are added."""
    return [site for step in steps_of(model, layer) for site in step]


def require_known(asked: str, known: Sequence[str], argument: str) -> None:
    """Refuse a word that an argument does not know.

    Raises:
        SiteError: with the words that it does know.
    """
    if asked not in known:
        raise SiteError(f'{argument}="{asked}" is not known; choose from {listed(known)}')


@dataclass(frozen=True)
class Batch:
    """States of the stream, each shared by a range of subsets that agree on every unit so far.

    Attributes:
        x: the states.
        prompt: the prompt of each.
        low, high: the range of each, in the sorted list of all subsets.
    """

    x: Float[Tensor, "row pos d_model"]
    prompt: Int[np.ndarray, " row"]
    low: Int[np.ndarray, " row"]
    high: Int[np.ndarray, " row"]

    def take(self, rows: Int[np.ndarray, " some"]) -> Batch:
        """Some of the rows."""
        return Batch(self.x[torch.from_numpy(rows)], self.prompt[rows], self.low[rows], self.high[rows])

    def pieces(self, size: int) -> Iterator[Batch]:
        """All rows in batches of about one size, none larger than that."""
        for rows in np.array_split(np.arange(len(self.x)), -(-len(self.x) // size)):
            yield self.take(rows)


@dataclass(frozen=True)
class Tree:
    """Runs of a model without some units, as a tree from the bottom up: what runs have in common is run once.

    Attributes:
        model: the model.
        tokens: its prompts.
        start: the stream below the first unit.
        stages: what runs from there on.
        writes: for each prompt, what stands in for each unit.
        score: from last residuals and their prompts to one number each.
    """

    model: ResidualModel
    tokens: Tokens
    start: Float[Tensor, "prompt pos d_model"]
    stages: Sequence[Stage]
    writes: Sequence[Mapping[Removable, Tensor]]
    score: Score

    @property
    def rows(self) -> int:
        """How many rows run at once; where more are waiting, the tree is climbed depth first, chunk by chunk."""
        return max(1, TOKENS_PER_CHUNK // self.tokens.width)

    def values(
        self, kept: Bool[np.ndarray, "prompt subset unit"], advance: Callable[[int], object] = lambda _: None
    ) -> Float[np.ndarray, "prompt subset"]:
        """The score of every prompt with each of its subsets of units kept.

        Args:
            kept: which units are kept in each run; runs that are the same are run once.
            advance: told of every so many different runs that are done.
        """
        prompts, subsets, _ = kept.shape
        if not subsets:
            return np.empty((prompts, 0))
        owners = np.repeat(np.arange(prompts), subsets)
        table = np.column_stack([owners, kept.reshape(prompts * subsets, -1)]).astype(np.int32)
        # Sorted by prompt, then by the lowest unit first, so that runs with a common beginning are neighbours.
        distinct, place = np.unique(table, axis=0, return_inverse=True)
        ends = np.searchsorted(distinct[:, 0], np.arange(prompts + 1))
        counts = np.concatenate([np.zeros_like(distinct[:1, 1:]), distinct[:, 1:].cumsum(axis=0, dtype=np.int32)])
        scores = np.empty(len(distinct))
        with torch.no_grad():
            for low, values in self._climb(0, Batch(self.start, np.arange(prompts), ends[:-1], ends[1:]), counts):
                scores[low] = values
                advance(len(low))
        return scores[place.reshape(-1)].reshape(prompts, subsets)

    def _climb(self, stage: int, batch: Batch, counts: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Run a batch to the end, piece by piece where it outgrows a chunk; at the top, each row is one run."""
        # A loop, not a call for each stage, so that only batches that were split are kept until all pieces are done.
        while len(batch.x) <= self.rows and stage < len(self.stages):
            batch, stage = self._pass(self.stages[stage], batch, counts), stage + 1
        if len(batch.x) <= self.rows:
            yield batch.low, to_numpy(self.score(batch.x, batch.prompt.tolist()))
            return
        for piece in batch.pieces(self.rows):
            yield from self._climb(stage, piece, counts)

    def _pass(self, stage: Stage, below: Batch, counts: np.ndarray) -> Batch:
        """One stage up; a row whose subsets differ in a unit there becomes two, one without it and one with it."""
        # Branches share what the trunk does to the stream around them; a whole layer has done it already.
        step = tuple(part for part, _ in stage if isinstance(part, Site))
        carry = self.model.carry(step) if step else UNCHANGED
        batch, origin = replace(below, x=carry.passing(below.x)), np.arange(len(below.x))
        for part, column in stage:
            middle = batch.low
            if column is not None:
                # Within a range, the subsets without the unit come first.
                middle = batch.high - (counts[batch.high, column] - counts[batch.low, column])
            without, keeping = np.flatnonzero(batch.low < middle), np.flatnonzero(middle < batch.high)
            out, kept = replace(batch, high=middle).take(without), replace(batch, low=middle).take(keeping)
            origin = np.concatenate([origin[without], origin[keeping]])
            x = torch.cat([self._removed(part, out), self._after(part, kept.x, below, origin[len(without) :])])
            ends = [np.concatenate([getattr(out, name), getattr(kept, name)]) for name in ("prompt", "low", "high")]
            batch = Batch(x, *ends)
        return replace(batch, x=carry.landing(batch.x))

    def _removed(self, part: Removable, batch: Batch) -> Tensor:
        """States after a unit that is removed."""
        if not len(batch.x):
            return batch.x
        if isinstance(part, Site) or self.model.adds_up(part):
            return self._with_stand_ins([part], batch.x, batch)
        x = batch.x
        for step in steps_of(self.model, part):
            carry = self.model.carry(step)
            x = carry.landing(self._with_stand_ins(step, carry.passing(x), batch))
        return x

    def _with_stand_ins(self, parts: Sequence[Removable], x: Tensor, batch: Batch) -> Tensor:
        """A stream and what stands in for some parts, where anything does."""
        for part in parts:
            if part in self.writes[0]:
                x = x + torch.stack([self.writes[prompt][part].expand_as(self.start[0]) for prompt in batch.prompt])
        return x

    def _after(self, part: Removable, x: Tensor, below: Batch, origin: np.ndarray) -> Tensor:
        """States after a part that runs; rows that read the same state below the stage share its one run."""
        if not len(x):
            return x
        needed, back = np.unique(origin, return_inverse=True)
        reading = below.take(needed)
        trunk = self.model.trunk(self.tokens.take(reading.prompt.tolist()))
        # A whole layer gives the state after it, as the model itself has it; a branch what it adds to the state.
        if isinstance(part, Site):
            return x + trunk.write(part, reading.x)[torch.from_numpy(back)]
        return trunk.layer(part, reading.x)[torch.from_numpy(back)]


def stages_of(model: ResidualModel, chosen: Sequence[Removable]) -> list[Stage]:
    """What runs from the first unit's layer up: a layer by its branches where one of them is a unit, else whole."""
    column: dict[Removable, int] = {unit: number for number, unit in enumerate(chosen)}
    stages: list[Stage] = []
    for layer in range(layer_of(chosen[0]), model.n_layers):
        if any(site in column for site in writes_of(model, layer)):
            stages += [[(site, column.get(site)) for site in step] for step in steps_of(model, layer)]
        else:
            stages.append([(layer, column.get(layer))])
    return stages


def layer_of(unit: Removable) -> int:
    """The layer that a unit is, or is in."""
    return unit.layer if isinstance(unit, Site) else unit


def _writes(model: ResidualModel, tokens: Tokens, units: Sequence[Removable]) -> dict[Removable, Tensor]:
    """What each unit adds to the stream; of a layer that does more to it than adding, what each branch adds."""
    carrying = [unit for unit in units if isinstance(unit, int) and not model.adds_up(unit)]
    units = [unit for unit in units if unit not in carrying] + [s for each in carrying for s in writes_of(model, each)]
    layers = [unit for unit in units if isinstance(unit, int)]
    sites = [Site(layer, kind) for layer in layers for kind in ("resid_pre", "resid_post")]
    parts = {unit: Site(unit.layer, "z") for unit in units if isinstance(unit, Site) and unit.kind == "head"}
    sites += [parts.get(unit, unit) for unit in units if isinstance(unit, Site)]
    values, _ = trace(model, model.trunk(tokens), sites)

    def added(unit: Removable) -> Tensor:
        if isinstance(unit, Site):
            return values[parts[unit]][:, :, unit.part] if unit in parts else values[unit]
        return values[Site(unit, "resid_post")] - values[Site(unit, "resid_pre")]

    return {unit: added(unit) for unit in units}


def _donor(seed: int, tokens: Tokens, prompt: int, source: Tokens, own: bool) -> int:
    """Another prompt, drawn from those that are long enough; the draw depends on the seed and the prompt alone."""
    length = tokens.lengths[prompt]
    able = [row for row, reach in enumerate(source.lengths) if reach >= length and not (own and row == prompt)]
    if not able:
        raise PromptError(
            f"prompt {prompt} has {length} tokens, and no other prompt to resample from is as long "
            f"(lengths {list(source.lengths)}); give some with reference=[...]"
        )
    rng = np.random.default_rng([seed, *tokens.ids[prompt, :length].tolist()])
    return able[rng.integers(len(able))]


def _cut(write: Tensor, width: int) -> Tensor:
    """A write at the width of another batch; only positions that both have are ever read."""
    return torch.nn.functional.pad(write, (0, 0, 0, max(0, width - len(write))))[:width]
