"""Recorded calls for fewer rows: which of their tensors have the batch as an axis, learned by comparing two sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from resstream.models.calls import Call


def narrow_calls(
    calls: Sequence[Call], wider: Sequence[Call], rows: int, cache: Cache | None
) -> tuple[Call, ...] | None:
    """The same calls for their first rows, or None where they do not show how they depend on the batch.

    Args:
        calls: as recorded for a batch.
        wider: as recorded for the same batch and one row more: what grew by one is the batch.
        rows: how many of the first rows are wanted.
        cache: what the narrower calls are given in place of their cache.
    """
    done: dict[tuple[int, int], Any] = {}

    def once(value: Any, other: Any) -> Any:
        """Blocks are mostly given the very same masks and tables, so each is cut once."""
        key = id(value), id(other)
        if key not in done:
            done[key] = _narrow(value, other, rows, cache)
        return done[key]

    def each(values: Any, others: Any) -> Any:
        if len(values) != len(others):
            raise _Unlike
        if isinstance(values, dict):
            return {name: once(value, others.get(name, _MISSING)) for name, value in values.items()}
        return tuple(map(once, values, others))

    try:
        return tuple(
            Call(each(call.args, other.args), each(call.kwargs, other.kwargs), call.key)
            for call, other in zip(calls, wider, strict=True)
        )
    except _Unlike:
        return None


_MISSING = object()


class _Unlike(Exception):
    """Two recordings differ in another way than by one row more."""


def _narrow(value: Any, wider: Any, rows: int, cache: Cache | None) -> Any:
    if type(value) is not type(wider):
        raise _Unlike
    if isinstance(value, Tensor):
        if value.shape == wider.shape:
            return value
        if value.shape[1:] == wider.shape[1:] and wider.shape[0] == value.shape[0] + 1:
            return value[:rows]
        raise _Unlike
    if isinstance(value, (tuple, list)) and len(value) == len(wider):
        return type(value)([_narrow(*pair, rows, cache) for pair in zip(value, wider, strict=True)])
    if isinstance(value, dict) and value.keys() == wider.keys():
        return {name: _narrow(value[name], wider[name], rows, cache) for name in value}
    if isinstance(value, Cache):
        return cache
    if value is None or (isinstance(value, (bool, int, float, str)) and value == wider):
        return value
    raise _Unlike
