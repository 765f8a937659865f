"""Arithmetic that stays in float64 where model code casts to float32: norms, rotary tables, softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class stay_float64(TorchFunctionMode):
    """Send every request for float32 to float64, for the length of a `with`.

    Model code written for half precision casts to float32 inside its norms and its softmax. In a float64 model that
    cast loses nine digits, which a sum with large cancellation cannot afford.

    >>> with stay_float64():
    ...     torch.ones(1, dtype=torch.float64).float().dtype
    torch.float64
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one torch function with float32 replaced by float64 wherever it is named."""
        if func is Tensor.float:
            func = Tensor.double
        wide = {name: _wide(value) for name, value in (kwargs or {}).items()}
        if func in (torch.tensor, torch.full) and "dtype" not in wide and _holds_floats([*args, *wide.values()]):
            wide["dtype"] = torch.float64
        return func(*map(_wide, args), **wide)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _holds_floats(value: Any) -> bool:
    return any(map(_holds_floats, value)) if isinstance(value, (list, tuple)) else isinstance(value, float)
