"""How much memory a piece of work takes at its peak, measured by running it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes that tensors made by a piece of work hold at one time.

    >>> peak_bytes(lambda: torch.zeros(1000) + torch.ones(1000))
    12000

    Kernels' own scratch space is not seen; it is small and does not grow with a batch of rows.

    Args:
        work: a function without arguments; what it returns counts for as long as it runs.
    """
    with _Ledger() as ledger:
        work()
    return ledger.peak


class _Ledger(TorchDispatchMode):
    """Adds up the storages that operations make, and takes each off again when it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {
            _storage(each) for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(out):
            if isinstance(each, Tensor) and _storage(each) not in before | self._known:
                self._open(each)
        return out

    def _open(self, made: Tensor) -> None:
        storage = made.untyped_storage()
        key, size = _storage(made), storage.nbytes()
        self._known.add(key)
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._close, key, size)

    def _close(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.held -= size


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
