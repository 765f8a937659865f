"""Rules about the skip connection itself: none, the identity, and the identity with something done to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor

from resstream.lab.require import number, one_of
from resstream.lab.rules.base import Place, Rule, Weights, drawn
from resstream.models.carry import Carry

_ON_THE_TRUNK = {"tanh": torch.tanh, "relu": torch.relu}


@final
@dataclass(frozen=True)
class Plain(Rule):
    """No skip: x <- F(x).

    >>> from resstream import lab
    >>> lab.mlp("plain", depth=4).carried[:2]
    ((Site(layer=0, kind='mlp', part=None),), (Site(layer=1, kind='mlp', part=None),))

    Source:
        He et al. 2015, Deep residual learning, section 4.1, for how it degrades with depth.
    """

    def carry(self, weights: Weights, place: Place) -> Carry:
        """Nothing of the stream passes by."""
        return Carry(before=lambda x: 0 * x)


@final
@dataclass(frozen=True)
class Residual(Rule):
    """The plain sum: x <- x + F(x).

    >>> from resstream import lab
    >>> lab.mlp("residual", depth=4).carried
    ()

    Source:
        He et al. 2016, Identity mappings in deep residual networks, equation 4.
    """


@final
@dataclass(frozen=True)
class ScaledSkip(Rule):
    """A skip with a factor: x <- lambda x + F(x), so that a stack of n scales its input by lambda^n.

    >>> from resstream import lab
    >>> lab.mlp(lab.ScaledSkip(0.9), depth=4).name
    'ScaledSkip(scale=0.9), 4 layers'

    Attributes:
        scale: lambda.

    Source:
        He et al. 2016, Identity mappings in deep residual networks, equation 6.
    """

    scale: float = 0.9

    def __post_init__(self) -> None:
        number("scale", self.scale)

    def carry(self, weights: Weights, place: Place) -> Carry:
        """The factor."""
        return Carry(before=lambda x: self.scale * x)


@final
@dataclass(frozen=True)
class TrunkActivation(Rule):
    """An activation on the trunk: x <- f(x + F(x)), so that nothing passes a step unchanged.

    >>> from resstream import lab
    >>> net = lab.mlp(lab.TrunkActivation("relu"), depth=4)
    >>> bool((net.forward(net.tokenize(torch.tensor([[5, 7]]))) >= 0).all())
    True

    Attributes:
        activation: f, "tanh" or "relu".

    Source:
        He et al. 2015, Deep residual learning, section 3.2, for ReLU after the addition; He et al. 2016, Identity
        mappings in deep residual networks, section 4, for what moving it into the branch gains.
    """

    activation: Literal["tanh", "relu"] = "tanh"

    def __post_init__(self) -> None:
        one_of("activation", self.activation, _ON_THE_TRUNK)

    def carry(self, weights: Weights, place: Place) -> Carry:
        """The activation, after the sum."""
        return Carry(after=_ON_THE_TRUNK[self.activation])


@final
@dataclass(frozen=True)
class GatedSkip(Rule):
    """A gate that lets pass either the stream or the branch: x <- (1 - g) x + g F(x), g = sigmoid(x W + b).

    >>> from resstream import lab
    >>> lab.mlp(lab.GatedSkip(bias=-3.0), depth=4).weights["2.mlp.gate.bias"][:2]
    tensor([-3., -3.], dtype=torch.float64)

    Attributes:
        bias: b at the start, the same for every number of the stream; below zero, most of the stream passes.

    Source:
        Srivastava et al. 2015, Highway networks, equation 3; He et al. 2016, Identity mappings in deep residual
        networks, section 3.1, "exclusive gating".
    """

    bias: float = -2.0

    def __post_init__(self) -> None:
        number("bias", self.bias)

    def start(self, place: Place, rng: torch.Generator) -> Weights:
        """W and b."""
        bias = torch.full((place.width,), float(self.bias), dtype=torch.float64)
        return {"gate": drawn(place.width, place.width, 1.0, rng), "gate.bias": bias}

    def write(
        self, y: Float[Tensor, "batch pos width"], x: Float[Tensor, "batch pos width"], weights: Weights
    ) -> Float[Tensor, "batch pos width"]:
        """What the gate lets pass of the branch."""
        return _gate(x, weights) * y

    def carry(self, weights: Weights, place: Place) -> Carry:
        """What the gate lets pass of the stream."""
        return Carry(before=lambda x: (1 - _gate(x, weights)) * x)


@final
@dataclass(frozen=True)
class ProjectedSkip(Rule):
    """A matrix on the skip: x <- x P + F(x), P ~ N(0, 1/width): a 1x1 convolution, where the stream is an image.

    >>> from resstream import lab
    >>> lab.mlp("projected_skip", depth=4, width=16).weights["2.mlp.skip"].shape
    torch.Size([16, 16])

    Source:
        He et al. 2016, Identity mappings in deep residual networks, section 3.1, "1x1 convolutional shortcut".
    """

    def start(self, place: Place, rng: torch.Generator) -> Weights:
        """P."""
        return {"skip": drawn(place.width, place.width, 1.0, rng)}

    def carry(self, weights: Weights, place: Place) -> Carry:
        """The matrix."""
        return Carry(before=lambda x: x @ weights["skip"])


def _gate(x: Float[Tensor, "batch pos width"], weights: Weights) -> Float[Tensor, "batch pos width"]:
    # A sigmoid, written as the softmax over its argument and 0: with scales and gates held fixed, a softmax counts as
    # a constant, while a sigmoid would count as an activation of its argument.
    z = x @ weights["gate"] + weights["gate.bias"]
    return torch.stack([z, torch.zeros_like(z)], dim=-1).softmax(-1)[..., 0]
