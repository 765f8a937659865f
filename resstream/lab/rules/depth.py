"""Rules whose constants follow from the depth of the stack: norms and starts that a deeper stack needs smaller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from resstream.lab.require import whole
from resstream.lab.rules.base import Batch, Place, Rule, Weights, layer_norm, norm_start
from resstream.models.carry import Carry

# The matrices that DeepNorm and T-Fixup scale; queries and keys are left as they are.
_VALUES = ("in", "out", "v", "o")


@dataclass(frozen=True)
class DeepNormScales:
    """The two constants of DeepNorm.

    >>> DeepNormScales.single(18).alpha
    2.449489742783178

    Attributes:
        alpha: the factor on the skip.
        beta: the factor on the start of the matrices of the perceptrons, of values and of outputs.

    Source:
        Wang et al. 2022, DeepNet: scaling Transformers to 1,000 layers, figure 2.
    """

    alpha: float
    beta: float

    @classmethod
    def single(cls, layers: int) -> DeepNormScales:
        """Of an encoder alone or a decoder alone: (2N)^(1/4) and (8N)^(-1/4) for N layers of two branches each.

        >>> DeepNormScales.single(100)
        DeepNormScales(alpha=3.7606030930863934, beta=0.1880301546543197)

        Raises:
            LabError: no whole number of layers.
        """
        whole("layers", layers)
        return cls((2 * layers) ** 0.25, (8 * layers) ** -0.25)

    @classmethod
    def encoder(cls, layers: int, decoder_layers: int) -> DeepNormScales:
        """Of the encoder, N layers deep, under a decoder of M layers: 0.81 (N^4 M)^(1/16) and 0.87 (N^4 M)^(-1/16).

        >>> DeepNormScales.encoder(12, 6)
        DeepNormScales(alpha=1.686222125536953, beta=0.41791647098427115)

        Raises:
            LabError: no whole numbers of layers.
        """
        whole("layers", layers)
        whole("decoder_layers", decoder_layers)
        depth = layers**4 * decoder_layers
        return cls(0.81 * depth ** (1 / 16), 0.87 * depth ** (-1 / 16))

    @classmethod
    def decoder(cls, layers: int) -> DeepNormScales:
        """Of a decoder of M layers over an encoder: (3M)^(1/4) and (12M)^(-1/4).

        >>> DeepNormScales.decoder(6)
        DeepNormScales(alpha=2.0597671439071177, beta=0.34329452398451965)

        Raises:
            LabError: no whole number of layers.
        """
        whole("layers", layers)
        return cls((3 * layers) ** 0.25, (12 * layers) ** -0.25)


@final
@dataclass(frozen=True)
class DeepNorm(Rule):
    """A larger skip into a norm after the sum: x <- LN(alpha x + F(x)), alpha = (2N)^(1/4), start by (8N)^(-1/4).

    >>> from resstream import lab
    >>> net, same = lab.transformer("deep_norm", layers=100, width=8), lab.transformer("post_ln", layers=100, width=8)
    >>> [round(float((net.weights[name] / same.weights[name]).mean()), 4) for name in ("7.attn.v", "7.attn.q")]
    [0.188, 1.0]

    N counts layers of two branches each, so that 2N is the number of steps, also in a stack of one branch a layer. The
    factor (8N)^(-1/4) is on the matrices of the perceptrons, of values and of outputs; queries and keys have none.

    Source:
        Wang et al. 2022, DeepNet: scaling Transformers to 1,000 layers, figure 2.
    """

    def start(self, place: Place, rng: torch.Generator) -> Weights:
        """The norm's weight and shift."""
        return norm_start(place.width)

    def gain(self, weight: str, place: Place) -> float:
        """Beta."""
        return (4 * place.steps) ** -0.25 if weight in _VALUES else 1.0

    def carry(self, weights: Weights, place: Place) -> Carry:
        """Alpha, and the norm on the sum."""
        alpha = place.steps**0.25
        return Carry(before=lambda x: alpha * x, after=lambda x: layer_norm(x, weights))


@final
@dataclass(frozen=True)
class GPT2Scaling(Rule):
    """A norm before each branch, x <- x + F(LN(x)), and last matrices that start smaller by 1 / sqrt(steps).

    >>> from resstream import lab
    >>> net, same = lab.transformer("gpt2_scaling", layers=2), lab.transformer("pre_ln", layers=2)
    >>> [round(float((net.weights[name] / same.weights[name]).mean()), 4) for name in ("1.mlp.out", "1.mlp.in")]
    [0.5, 1.0]

    So the steps add up to as much as one branch writes, however many there are.

    Source:
        Radford et al. 2019, Language models are unsupervised multitask learners, section 2.3.
    """

    @property
    def normed(self) -> bool:
        """It does."""
        return True

    def start(self, place: Place, rng: torch.Generator) -> Weights:
        """The norm's weight and shift."""
        return norm_start(place.width)

    def gain(self, weight: str, place: Place) -> float:
        """1 / sqrt(steps) on the last matrices."""
        return place.steps**-0.5 if weight in ("o", "out") else 1.0

    def read(self, x: Float[Tensor, "batch pos width"], weights: Weights) -> Float[Tensor, "batch pos width"]:
        """The stream, normed."""
        return layer_norm(x, weights)


@final
@dataclass(frozen=True)
class LNScaling(Rule):
    """A norm before each branch that shrinks with depth: x <- x + F(LN(x) / sqrt(l)) in layer l, counted from 1.

    >>> from resstream import lab
    >>> net = lab.transformer("ln_scaling", layers=4)
    >>> trunk = net.trunk(net.tokenize(torch.tensor([[5]])))
    >>> [float(trunk.prepared[site]["factor"]) for site in net.design.sites[:2] + net.design.sites[-2:]]
    [1.0, 1.0, 0.5, 0.5]

    Source:
        Sun et al. 2025, The curse of depth in large language models, section 4.
    """

    @property
    def normed(self) -> bool:
        """It does."""
        return True

    def start(self, place: Place, rng: torch.Generator) -> Weights:
        """The norm's weight and shift."""
        return norm_start(place.width)

    def prepare(self, weights: Weights, place: Place, batch: Batch) -> Weights:
        """The factor of the layer."""
        return {**weights, "factor": torch.tensor((place.layer + 1) ** -0.5, dtype=torch.float64)}

    def read(self, x: Float[Tensor, "batch pos width"], weights: Weights) -> Float[Tensor, "batch pos width"]:
        """The stream, normed and scaled."""
        return weights["factor"].to(x) * layer_norm(x, weights)
