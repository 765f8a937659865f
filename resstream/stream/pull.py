"""Gradients pulled back through one part of the trunk at a time: J^T v for many vectors v at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

Part: TypeAlias = Callable[[Tensor], Tensor]

# Vectors x positions pulled back in one call; more would only grow the memory of attention's backward.
AT_ONCE = 2048


def pull(
    part: Part, x: Float[Tensor, "1 pos d_model"], vectors: Float[Tensor, "vector pos d_model"]
) -> Float[Tensor, "vector pos d_model"]:
    """Multiply vectors by the transposed Jacobian of a part of the trunk at its actual input.

    >>> pull(lambda x: 3 * x, torch.ones(1, 2, 4), torch.ones(5, 2, 4)).shape
    torch.Size([5, 2, 4])

    The part runs forward once, on one row; only the way back is batched.

    Args:
        part: from stream to stream, such as one write.
        x: the stream that it reads.
        vectors: gradients at its output.
    Returns:
        The gradients at its input.
    """
    return Pullback(part, x)(vectors)


class Pullback:
    """The way back through a part of the trunk, prepared once and gone as often as wanted."""

    def __init__(self, part: Part, x: Float[Tensor, "1 pos d_model"]):
        with torch.enable_grad():
            self._leaf = x.detach().requires_grad_()
            self._out = part(self._leaf)

    def __call__(self, vectors: Float[Tensor, "vector pos d_model"]) -> Float[Tensor, "vector pos d_model"]:
        """Gradients at the part's input from gradients at its output; none from a part that does not read it."""
        if not self._out.requires_grad:
            return torch.zeros_like(vectors)
        size = max(1, AT_ONCE // vectors.shape[1])
        pieces = vectors[:, None].split(size) if len(vectors) else ()
        return torch.cat([vectors[:0], *(_pull_some(self._out, self._leaf, some) for some in pieces)])


def gradient(scalar: Part, x: Float[Tensor, "1 pos d_model"]) -> Float[Tensor, "pos d_model"]:
    """The gradient of a scalar function of the stream, by one plain backward pass."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(scalar(leaf).sum(), leaf)
    return found[0]


def _pull_some(out: Tensor, leaf: Tensor, vectors: Float[Tensor, "vector 1 pos d_model"]) -> Tensor:
    try:
        (found,) = torch.autograd.grad(out, leaf, vectors, retain_graph=True, is_grads_batched=True)
    except RuntimeError:
        # Some backward kernels cannot be batched; one vector at a time gives the same numbers.
        found = torch.stack([torch.autograd.grad(out, leaf, each, retain_graph=True)[0] for each in vectors])
    return found[:, 0]
