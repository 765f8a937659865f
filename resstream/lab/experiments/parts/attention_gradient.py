"""How much of the gradient an attention pattern passes on to its scores: nothing, where each row picks one token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from resstream.check import Check
from resstream.errors import LabError
from resstream.lab.branches import Attention
from resstream.lab.experiments.parts.at_start import Sample, mean_loss
from resstream.lab.nets import Net
from resstream.models.trunk import relative_distance


@dataclass(frozen=True)
class _Seen:
    """The queries, keys and patterns of all layers, with their gradients."""

    q: list[Tensor] = field(default_factory=list)
    k: list[Tensor] = field(default_factory=list)
    pattern: list[Tensor] = field(default_factory=list)

    def keep(self, kind: str) -> Callable[[Tensor], Tensor]:
        """A function that reads a value inside a branch."""

        def read(value: Tensor) -> Tensor:
            getattr(self, kind).append(value)
            return value

        return read


@dataclass(frozen=True)
class Passed:
    """What became of the gradient at the patterns.

    Attributes:
        share: of a row of a pattern, the norm of the gradient at its scores over that at the row; the median over all
            rows of all layers.
        check: the queries' gradient that follows from it, against autograd.
    """

    share: float
    check: Check


def through_softmax(
    pattern: Float[Tensor, "*rows key"], slope: Float[Tensor, "*rows key"]
) -> Float[Tensor, "*rows key"]:
    """The gradient at the scores of a softmax, from that at its pattern: p * (g - <p, g>).

    >>> through_softmax(torch.tensor([0.0, 1.0]), torch.tensor([4.0, 3.0]))
    tensor([0., 0.])
    """
    return pattern * (slope - (pattern * slope).sum(-1, keepdim=True))


def attention_gradient(net: Net, sample: Sample) -> Passed:
    """Run a Transformer backward from its mean loss, and see how much reaches its attention scores.

    >>> from resstream import lab
    >>> from resstream.lab.experiments.parts.at_start import random_words
    >>> found = attention_gradient(lab.transformer(layers=1, width=8), random_words(2, 4))
    >>> 0 < found.share < 1, found.check.passed
    (True, True)

    Raises:
        LabError: a net without attention.
    """
    seen, attention = _Seen(), net.design.branches.get("attn")
    if not isinstance(attention, Attention):
        raise LabError(f"{net.name} has no attention; give a net from lab.transformer")
    with torch.enable_grad():
        trunk = net.trunk(net.tokenize(sample.ids))
        x = trunk.x0.requires_grad_()
        for layer in trunk.order:
            x = trunk.layer(layer, x, {kind: seen.keep(kind) for kind in ("q", "k", "pattern")})
        slopes = torch.autograd.grad(mean_loss(net, x, sample), [*seen.pattern, *seen.q])
    patterns, keys = [each.detach() for each in seen.pattern], [each.detach() for each in seen.k]
    at_patterns, at_queries = slopes[: net.n_layers], slopes[net.n_layers :]
    at_scores = [through_softmax(*pair) for pair in zip(patterns, at_patterns, strict=True)]
    factor = attention.sharpness / seen.q[0].shape[-1] ** 0.5
    by_hand = [factor * torch.einsum("bhqk,bkhd->bqhd", *pair) for pair in zip(at_scores, keys, strict=True)]
    shares = torch.stack(at_scores).norm(dim=-1) / torch.stack(at_patterns).norm(dim=-1)
    # All layers together: where rows are one-hot a layer's own gradient is nothing but rounding.
    error = relative_distance(torch.stack(by_hand), torch.stack(at_queries))
    return Passed(float(shares.median()), Check("scores' gradient = p (g - <p, g>)", error, 1e-10))
