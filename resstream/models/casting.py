"""A model's weights in another floating-point type, for a copy of it that never holds them twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def cast_weights(module: nn.Module, dtype: torch.dtype) -> dict[int, Any]:
    """Weights in another type, by the id of each original: the `memo` with which `copy.deepcopy` makes the copy.

    Cast is what a checkpoint holds. Tables that a model computes itself, such as rotary frequencies, stay as they are,
    as they do in a model that is loaded in that type; so do weights that are tied.

    >>> import copy
    >>> layer = nn.Linear(2, 2)
    >>> copy.deepcopy(layer, cast_weights(layer, torch.bfloat16)).weight.dtype, layer.weight.dtype
    (torch.bfloat16, torch.float32)
    """
    saved = module.state_dict(keep_vars=True).values()
    return {id(value): _cast(value, dtype) for value in saved if value.is_floating_point()}


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    new = value.detach().to(dtype, copy=True)
    return nn.Parameter(new, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else new
