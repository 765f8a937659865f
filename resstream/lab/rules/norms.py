"""Rules about where a norm stands: before the branch, after the sum, on both sides, or led by a condition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from resstream.errors import LabError
from resstream.lab.rules.base import Batch, Place, Rule, Weights, layer_norm, norm_start
from resstream.models.carry import Carry


@final
@dataclass(frozen=True)
class PreLN(Rule):
    """A norm before each branch: x <- x + F(LN(x)), and one at the end.

    >>> from resstream import lab
    >>> lab.transformer("pre_ln", layers=2).carried
    ()

    Source:
        Xiong et al. 2020, On layer normalization in the Transformer architecture, figure 1b.
    """

    @property
    def normed(self) -> bool:
        """It does."""
        return True

    def start(self, place: Place, rng: torch.Generator) -> Weights:
        """The norm's weight and shift."""
        return norm_start(place.width)

    def read(self, x: Float[Tensor, "batch pos width"], weights: Weights) -> Float[Tensor, "batch pos width"]:
        """The stream, normed."""
        return layer_norm(x, weights)


@final
@dataclass(frozen=True)
class PostLN(Rule):
    """A norm after each sum: x <- LN(x + F(x)).

    >>> from resstream import lab
    >>> len(lab.transformer("post_ln", layers=2).carried)
    4

    Source:
        Vaswani et al. 2017, Attention is all you need, section 3.1.
    """

    def start(self, place: Place, rng: torch.Generator) -> Weights:
        """The norm's weight and shift."""
        return norm_start(place.width)

    def carry(self, weights: Weights, place: Place) -> Carry:
        """The norm, on the stream itself."""
        return Carry(after=lambda x: layer_norm(x, weights))


@final
@dataclass(frozen=True)
class SandwichLN(Rule):
    """A norm on either side of the branch: x <- x + LN'(F(LN(x))), and one at the end.

    >>> import resstream as rs
    >>> from resstream import lab
    >>> net = lab.transformer("sandwich_ln", layers=2)
    >>> seen = rs.read(net, torch.tensor([[5, 7, 9]]), sites="attn")
    >>> seen["1.attn"].std(-1, correction=0).round(decimals=3)
    tensor([[1., 1., 1.]], dtype=torch.float64)

    So at the start every step adds as much as every other, whatever its branch returns.

    Source:
        Ding et al. 2021, CogView: mastering text-to-image generation via Transformers, "Sandwich LayerNorm".
    """

    @property
    def normed(self) -> bool:
        """It does."""
        return True

    def start(self, place: Place, rng: torch.Generator) -> Weights:
        """Weight and shift of both norms."""
        return {**norm_start(place.width), **norm_start(place.width, "second")}

    def read(self, x: Float[Tensor, "batch pos width"], weights: Weights) -> Float[Tensor, "batch pos width"]:
        """The stream, normed."""
        return layer_norm(x, weights)

    def write(
        self, y: Float[Tensor, "batch pos width"], x: Float[Tensor, "batch pos width"], weights: Weights
    ) -> Float[Tensor, "batch pos width"]:
        """What the branch returns, normed."""
        return layer_norm(y, weights, "second")


@final
@dataclass(frozen=True)
class AdaLN(Rule):
    """A norm led by a condition c: x <- x + gate F((1 + scale) LN(x) + shift), (shift, scale, gate) = silu(c) W + b.

    >>> from resstream import lab
    >>> net = lab.transformer("ada_ln", layers=2)
    >>> tokens = net.tokenize(torch.tensor([[5, 7]]))
    >>> bool((net.forward(tokens) == net.trunk(tokens).x0).all())
    True

    W and b are zero at the start, and so is the gate: each step is the identity ("adaLN-Zero"). The condition of a
    prompt is a vector of its own for its first token, and no part of the stream: gradients along the stream, and paths,
    pass it by. LN has no weights here, but for the one at the end.

    Source:
        Peebles and Xie 2023, Scalable diffusion models with Transformers, section 3.2, "adaLN-Zero block".
    """

    conditioned: ClassVar[bool] = True

    @property
    def normed(self) -> bool:
        """It does."""
        return True

    def start(self, place: Place, rng: torch.Generator) -> Weights:
        """W and b."""
        return {
            "condition": torch.zeros(place.width, 3 * place.width, dtype=torch.float64),
            "condition.bias": torch.zeros(3 * place.width, dtype=torch.float64),
        }

    def prepare(self, weights: Weights, place: Place, batch: Batch) -> Weights:
        """Shift, scale and gate of each prompt.

        Raises:
            LabError: a batch without conditions.
        """
        if batch.condition is None:
            raise LabError(
                "AdaLN reads a vector for each prompt, and this batch has none; run the rule in a net from lab.mlp or "
                "lab.transformer, or give Batch(shape, condition=...)"
            )
        led = functional.silu(batch.condition) @ weights["condition"] + weights["condition.bias"]
        shift, scale, gate = led[:, None].chunk(3, dim=-1)
        return {**weights, "shift": shift, "scale": scale, "gate": gate}

    def read(self, x: Float[Tensor, "batch pos width"], weights: Weights) -> Float[Tensor, "batch pos width"]:
        """The stream, normed, scaled and shifted."""
        return (1 + weights["scale"]) * functional.layer_norm(x, x.shape[-1:]) + weights["shift"]

    def write(
        self, y: Float[Tensor, "batch pos width"], x: Float[Tensor, "batch pos width"], weights: Weights
    ) -> Float[Tensor, "batch pos width"]:
        """What the gate lets pass of the branch."""
        return weights["gate"] * y
