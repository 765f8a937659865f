"""What a trunk does to the stream itself, told apart by numbers: a norm, an activation, a rounding, or a factor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from resstream.models.carry import Carry
from resstream.models.trunk import relative_distance

Kind: TypeAlias = Literal["norm", "activation", "rounding", "factor", "other"]

# Far above the epsilon inside a norm, far below what doubling its input does to an activation.
_SAME = 1e-2
# The coarsest rounding that still counts as one: three bits behind the point lose up to a sixteenth.
_COARSEST = 1 / 16


def kind_of(part: Callable[[Tensor], Tensor], like: Float[Tensor, "batch pos d_model"]) -> Kind:
    """What a function does to the stream, from what it does to random numbers.

    >>> x = torch.zeros(1, 2, 8)
    >>> kind_of(torch.relu, x), kind_of(lambda x: torch.nn.functional.layer_norm(x, (8,)), x)
    ('activation', 'norm')
    >>> kind_of(lambda x: 0.9 * x, x), kind_of(lambda x: x.bfloat16().float(), x)
    ('factor', 'rounding')

    Args:
        part: the part of a `Carry` that acts before or after the sum.
        like: a stream of the shape and type that it takes.
    """
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(like.shape, generator=rng).to(like)
    with torch.no_grad():
        once, doubled, turned = part(x), part(2 * x), part(-x)
        if relative_distance(once, x) < _COARSEST and torch.equal(part(once), once):
            return "rounding"
        if bool(once.any()) and relative_distance(doubled, once) < _SAME:
            return "norm"
        if relative_distance(doubled, 2 * once) < _SAME and relative_distance(turned, -once) < _SAME:
            return "factor"
        moved = x.clone()
        moved[..., 0] += 1
        return "activation" if torch.equal(part(moved)[..., 1:], once[..., 1:]) else "other"


def without_rounding(carry: Carry, like: Float[Tensor, "batch pos d_model"]) -> Carry:
    """A carry without those of its parts that only round the stream."""
    before, after = carry.before, carry.after
    return Carry(
        None if before is None or kind_of(before, like) == "rounding" else before,
        None if after is None or kind_of(after, like) == "rounding" else after,
    )
