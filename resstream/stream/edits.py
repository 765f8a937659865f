"""Edits as values: what to change on the stream, and where."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from resstream.errors import EditError
from resstream.models.tokens import Positions, Prompts, Tokens
from resstream.models.trunk import ResidualModel
from resstream.sites import Site
from resstream.stream.parts import at_positions
from resstream.stream.read import read

# "batch pos d_model" on the stream; a pattern is "batch head query key", other values inside a branch "batch pos ...".
Value: TypeAlias = Float[Tensor, "batch ..."]


@dataclass(frozen=True)
class Edit(ABC):
    """A change at one site, on the stream or inside a branch, at some positions of every prompt.

    Attributes:
        site: the place, such as "7.attn", "12.resid_post" or "5.head.3".
        positions: an index, several, or a slice, counted within each prompt (-1 is its last token); None means all.
    """

    site: str
    positions: Positions = field(default=None, kw_only=True)

    @abstractmethod
    def change(self, value: Value, tokens: Tokens) -> Value:
        """The new value at the site; it takes effect at the chosen positions only."""

    def prepare(self, model: ResidualModel) -> Edit:
        """Check the edit against the model that it is meant for, and read what it needs from its reference prompts."""
        return replace(self, site=str(model.site(self.site)))

    def apply(self, value: Value, tokens: Tokens, site: Site) -> Value:
        """Change a value at the chosen positions, and leave every other position bit-equal."""
        chosen = at_positions(tokens.at(self.positions), value, site)
        return torch.where(chosen, self.change(value, tokens), value)

    def _fit(self, given: Tensor, value: Value) -> Value:
        given = torch.as_tensor(given).to(value)
        try:
            return given.expand_as(value)
        except RuntimeError:
            raise EditError(
                f'{type(self).__name__} at "{self.site}" got a tensor of shape {list(given.shape)}, but what is there '
                f"has the shape {list(value.shape)} ({_axes(self.site)}); give one that broadcasts to it, such as a "
                f"vector of {value.shape[-1]} numbers"
            ) from None


@dataclass(frozen=True)
class Replace(Edit):
    """Put a value in place of what is there.

    >>> edit = Replace("12.resid_post", torch.zeros(576), positions=-1)
    """

    value: Tensor

    def change(self, value: Value, tokens: Tokens) -> Value:
        """The given value, spread over prompts and positions."""
        return self._fit(self.value, value)


@dataclass(frozen=True)
class Add(Edit):
    """Add a vector: steering.

    >>> edit = Add("12.resid_post", torch.ones(576))
    """

    vector: Tensor

    def change(self, value: Value, tokens: Tokens) -> Value:
        """The old value plus the vector."""
        return value + self._fit(self.vector, value)


@dataclass(frozen=True)
class Scale(Edit):
    """Multiply what is there by a number.

    >>> edit = Scale("7.attn", 0.5)
    """

    factor: float

    def change(self, value: Value, tokens: Tokens) -> Value:
        """The old value times the factor."""
        return value * self.factor


@dataclass(frozen=True)
class Zero(Edit):
    """Put zeros there; at a branch's write, this removes the branch.

    >>> edit = Zero("7.attn")
    """

    def change(self, value: Value, tokens: Tokens) -> Value:
        """Zeros."""
        return torch.zeros_like(value)


@dataclass(frozen=True)
class Mean(Edit):
    """Put the mean over reference prompts there: one vector, averaged over all their real tokens.

    >>> edit = Mean("7.attn", ["The cat sat on the mat.", "A storm is coming from the west."])
    """

    prompts: Prompts

    def prepare(self, model: ResidualModel) -> Edit:
        """Read the reference prompts and take their mean."""
        site = _site_of_prompts(self, model)
        return Replace(site, mean_write(read_one(model, self.prompts, site)), positions=self.positions)

    def change(self, value: Value, tokens: Tokens) -> Value:
        """Refused: the mean is not known before the edit has met its model."""
        raise EditError(_unprepared(self))


@dataclass(frozen=True)
class Resample(Edit):
    """Put there what a reference prompt, drawn at random for each prompt, has at the same position.

    Which one is drawn depends on the seed and on the prompt alone, so a prompt in a batch gets what it gets alone.

    >>> edit = Resample("7.attn", ["When Anna and Tom went home, Tom gave a book to"], seed=0)
    """

    prompts: Prompts
    seed: int = 0

    def prepare(self, model: ResidualModel) -> Edit:
        """Read the reference prompts; one is drawn for each prompt when that prompt is run."""
        site = _site_of_prompts(self, model)
        return _Donated(site, read_one(model, self.prompts, site), self.seed, positions=self.positions)

    def change(self, value: Value, tokens: Tokens) -> Value:
        """Refused: the references are not known before the edit has met its model."""
        raise EditError(_unprepared(self))


@dataclass(frozen=True)
class Noise(Edit):
    """Add Gaussian noise, the same for the same seed; the global random state is neither read nor moved.

    Each position has its own noise, which is the same in every prompt, so a prompt in a batch gets what it gets alone;
    give another seed for another sample.

    >>> edit = Noise("embed", std=0.1, seed=0)
    """

    std: float
    seed: int = 0

    def prepare(self, model: ResidualModel) -> Edit:
        """Check the edit against the model that it is meant for."""
        return replace(self, site=_site_of_prompts(self, model))

    def change(self, value: Value, tokens: Tokens) -> Value:
        """The old value plus noise of standard deviation `std`, in the stream's own units."""
        # NumPy draws number by number, so that a longer prompt begins with the noise of a shorter one.
        noise = np.random.default_rng(self.seed).standard_normal(value.shape[1:])
        return value + self.std * torch.from_numpy(noise).to(value)


@dataclass(frozen=True)
class Apply(Edit):
    """Put there whatever a function makes of it: `fn(tensor, site) -> tensor`; gradients flow through.

    >>> edit = Apply("3.mlp", lambda value, site: value.clamp(min=0))
    """

    fn: Callable[[Tensor, str], Tensor]

    def change(self, value: Value, tokens: Tokens) -> Value:
        """What the function returned, which must have the stream's shape. It gets a copy, so it may work in place."""
        new = self.fn(value.clone(), self.site)
        if not isinstance(new, Tensor):
            raise EditError(
                f'the function applied at "{self.site}" returned {type(new).__name__}; '
                f"it must return a tensor of shape {list(value.shape)}"
            )
        return self._fit(new, value)


@dataclass(frozen=True)
class Skip:
    """Leave out a whole layer, Skip(7), or one branch of it, Skip("7.attn").

    Where the trunk does something to the stream itself, as a scaled skip does, a layer is left out together with that;
    past a branch that is left out the trunk still acts, on a stream to which nothing was written.

    >>> edit = Skip(7)
    """

    what: int | str


@dataclass(frozen=True)
class Reorder:
    """Run the layers in another order; one may come twice or not at all, and keeps its own mask and rotary positions.

    >>> edit = Reorder([0, 2, 1, 3])
    """

    order: Sequence[int]


@dataclass(frozen=True)
class _Donated(Edit):
    """What `Resample` becomes once its reference prompts have been read."""

    donors: tuple[Tensor, ...]
    seed: int

    def change(self, value: Value, tokens: Tokens) -> Value:
        chosen = tokens.at(self.positions)
        new = value.clone()
        for row, length in enumerate(tokens.lengths):
            if not chosen[row].any():
                continue
            reach = 1 + int(chosen[row].nonzero().max())
            able = [donor for donor in self.donors if len(donor) >= reach]
            if not able:
                raise EditError(
                    f'Resample at "{self.site}" needs position {reach - 1} of a reference prompt, but the longest has '
                    f"{max(map(len, self.donors))} tokens; give longer reference prompts"
                )
            rng = np.random.default_rng([self.seed, *tokens.ids[row, :length].tolist()])
            donor = able[rng.integers(len(able))]
            new[row, :reach] = donor[:reach].to(value)
        return new


def read_one(model: ResidualModel, prompts: Prompts, site: str | Site) -> tuple[Float[Tensor, "pos ..."], ...]:
    """What each reference prompt has at a site, cut to its real tokens."""
    stream = read(model, prompts, sites=[str(site)])
    return tuple(value[:length] for value, length in zip(stream[site], stream.tokens.lengths, strict=True))


def mean_write(values: Sequence[Float[Tensor, "_ ..."]]) -> Tensor:
    """The mean over all positions of all prompts, in float64 so that batching cannot move it."""
    return torch.cat([value.double() for value in values]).mean(dim=0)


def _site_of_prompts(edit: Edit, model: ResidualModel) -> str:
    """The site of an edit that puts there what does not depend on the prompt's length, which a pattern always does."""
    site = model.site(edit.site)
    if site.kind == "pattern":
        raise EditError(
            f'{type(edit).__name__} at "{site}": a pattern has as many columns as its prompt has tokens, so it has no '
            "mean, sample or noise that fits every prompt; use Replace, Scale, Zero or Apply with a pattern of your own"
        )
    return str(site)


def _axes(site: str) -> str:
    """The axes of what is at a site, in words."""
    _, kind, *part = site.split(".")
    axes = {"head": "head, d_model", "neuron": "neuron", **dict.fromkeys(("z", "q", "k", "v"), "head, d_head")}
    if kind == "pattern":
        return "prompt, query, key" if part else "prompt, head, query, key"
    own = axes.get(kind, "d_model").split(", ")
    return ", ".join(["prompt", "position", *(own[1:] if part else own)])


def _unprepared(edit: Edit) -> str:
    return f"{type(edit).__name__} reads its prompts through a model; use it as `with rs.edited(model, edit) as m:`"
