"""Caches as the Hugging Face library knows them, that remember a base run or continue it, and never grow."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from resstream.models.left_context import LeftContext
from resstream.models.tokens import Tokens


class _Stateless(DynamicLayer):
    """One layer's part of a cache whose length does not depend on how often the layer has run.

    Every layer claims to see all positions: the model's own mask then covers them all, and cuts its windows itself.
    """

    start = 0

    def get_seq_length(self) -> int:
        """How many positions stand to the left of those that run."""
        return self.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys there are, and the position of the first."""
        return self.start + query_length, 0


class _Keep(_Stateless):
    """Keeps the keys and values of the last time that the layer ran."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Note what attention is about to read, in memory of its own: it is often a view of queries, too."""
        form = torch.contiguous_format
        self.keys = key_states.detach().clone(memory_format=form)
        self.values = value_states.detach().clone(memory_format=form)
        return key_states, value_states


class _Continue(_Stateless):
    """Puts the left context before a layer's own keys and values."""

    def __init__(self, left: LeftContext, layer: int):
        super().__init__()
        self.left, self.layer, self.start = left, layer, left.until

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """What attention reads: all positions from the first, for the rows that run."""
        keys, values = self.left.before(self.layer)
        return torch.cat([keys, key_states], dim=-2), torch.cat([values, value_states], dim=-2)


def keeping(n_layers: int) -> Cache:
    """A cache that notes each layer's keys and values whenever it runs, and adds nothing to them."""
    return Cache(layers=[_Keep() for _ in range(n_layers)])


def kept_by(cache: Cache, tokens: Tokens) -> LeftContext:
    """What a keeping cache has noted so far, as a value that later runs do not change."""
    ran = {layer: part for layer, part in enumerate(cache.layers) if part.keys is not None}
    return LeftContext(
        tokens,
        {layer: part.keys for layer, part in ran.items()},
        {layer: part.values for layer, part in ran.items()},
        tuple(range(len(tokens))),
        tokens.width,
    )


def continuing(left: LeftContext, n_layers: int) -> Cache:
    """A cache in which the positions of a left context have run already."""
    return Cache(layers=[_Continue(left, layer) for layer in range(n_layers)])


def arguments_with(cache: Cache, hf_model: nn.Module) -> dict[str, Any]:
    """The arguments by which a model takes a cache; their name differs between versions of the library."""
    name = "cache" if "cache" in signature(hf_model.forward).parameters else "past_key_values"
    return {name: cache, "use_cache": True}
