"""Rows: the variants of a forward pass that a sweep is made of, as values, and the base run that they vary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from resstream.models.left_context import LeftContext
from resstream.models.tokens import Tokens
from resstream.models.trunk import ResidualModel
from resstream.sites import Site
from resstream.stream.read import trace


@dataclass(frozen=True)
class Put:
    """A value that a row has at a site in place of its own.

    Attributes:
        value: the value at every position of the prompt, "pos ..." (a pattern's: queries, at its last axis but one).
        where: the positions at which it is put; None means all.
    """

    value: Tensor
    where: Bool[Tensor, " pos"] | None = None

    @property
    def first(self) -> int:
        """The first position at which it is put; beyond the last one if there is none."""
        if self.where is None:
            return 0
        found = self.where.nonzero()
        return int(found[0]) if len(found) else len(self.where)

    def over(self, own: Tensor, *, axis: int = 0) -> Tensor:
        """The value of a row that ends where this one does, with this put over it.

        Args:
            own: the row's own value at the last positions of the prompt.
            axis: which of its axes is the position.
        """
        start = self.value.shape[axis] - own.shape[axis]
        value = self.value.narrow(axis, start, own.shape[axis]).to(own)
        if self.where is None:
            return value
        shape = [-1 if number == axis else 1 for number in range(own.ndim)]
        return torch.where(self.where[start:].view(shape), value, own)


@dataclass(frozen=True)
class Row:
    """One variant of a base run.

    Attributes:
        prompt: which prompt of the batch it varies.
        enter: the state at which it joins: a layer's "resid_pre" or "resid_mid", or the last "resid_post".
        stream: makes the stream that it has there; made late, so that a long sweep holds only one chunk of them. By
            default it is the base run's own.
        change: later states, writes and values inside a branch that are put in place of its own, or left out (None).
        skip: layers that leave its stream as they find it, with all that the trunk itself does there.
        twins: prompts of the batch whose own run it may turn out to be; its own prompt is always compared.
    """

    prompt: int
    enter: Site
    stream: Callable[[], Float[Tensor, "pos d_model"]] | None = None
    change: Mapping[Site, Put | None] = field(default_factory=dict)
    skip: frozenset[int] = frozenset()
    twins: tuple[int, ...] = ()

    @property
    def in_steps(self) -> set[int]:
        """The layers that it runs write by write: it changes a write or the middle there, or enters halfway."""
        parted = {site.layer for site in self.change if site.is_write or site.kind == "resid_mid"}
        return (parted | {self.enter.layer} if self.enter.kind == "resid_mid" else parted) - self.skip


@dataclass(frozen=True)
class Base:
    """The unedited run of all prompts: where rows come from, and what they are compared with.

    Attributes:
        tokens: the prompts.
        values: "resid_pre" of every layer, the last "resid_post", and whatever else was asked for.
        final: the last residuals, which the readout reads.
        left: what each position gave to the ones after it, which rows that begin to differ later can reuse; None where
            the model cannot.
    """

    tokens: Tokens
    values: Mapping[Site, Float[Tensor, "prompt ..."]]
    final: Float[Tensor, "prompt pos d_model"]
    left: LeftContext | None = None

    @classmethod
    def of(cls, model: ResidualModel, tokens: Tokens, sites: Iterable[Site] = ()) -> Base:
        """Run prompts once, and keep the boundaries that rows may enter at, and the values at some more sites."""
        with torch.no_grad():
            trunk = model.trunk(tokens, keep=True) if model.reuses_left else model.trunk(tokens)
            values, final = trace(model, trunk, {*boundaries(model), *sites})
        return cls(tokens, values, final, trunk.left)

    def stream(self, row: Row) -> Float[Tensor, "pos d_model"]:
        """The stream that a row enters with."""
        return self.values[row.enter][row.prompt] if row.stream is None else row.stream()

    def first(self, row: Row) -> int:
        """The first position at which a row can differ from its base run; beyond its last one if it cannot."""
        ends = [0 if put is None else put.first for put in row.change.values()] + [0] * len(row.skip)
        if row.stream is not None:
            changed = (row.stream() != self.values[row.enter][row.prompt]).any(-1).nonzero()
            ends += [int(changed[0])] if len(changed) else []
        return min(ends, default=self.tokens.width)

    def twin(self, row: Row) -> int | None:
        """The prompt whose base run a row is, bit for bit, if there is one."""
        if row.change or row.skip:
            return None
        stream = self.stream(row)
        for prompt in (row.prompt, *row.twins):
            length = self.tokens.lengths[prompt]
            same_end = length == self.tokens.lengths[row.prompt]
            if same_end and torch.equal(stream[:length], self.values[row.enter][prompt, :length]):
                return prompt
        return None


def entry_after(model: ResidualModel, layer: int) -> Site:
    """Where a row joins that has a layer's output already."""
    return Site(layer + 1, "resid_pre") if layer + 1 < model.n_layers else Site(layer, "resid_post")


def boundaries(model: ResidualModel) -> list[Site]:
    """The states between layers, each once: every layer's input, and the last one's output."""
    return [*(Site(layer, "resid_pre") for layer in range(model.n_layers)), Site(model.n_layers - 1, "resid_post")]


def depth(site: Site) -> tuple[int, int]:
    """How far up the stream a state is."""
    return site.layer, ("resid_pre", "resid_mid", "resid_post").index(site.kind)
