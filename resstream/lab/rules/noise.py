"""Rules that draw at random in training, and take the expectation outside of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from resstream.lab.require import share
from resstream.lab.rules.base import Batch, Place, Rule, Weights
from resstream.models.carry import Carry


@final
@dataclass(frozen=True)
class DropoutSkip(Rule):
    """Dropout on the skip: x <- m x + F(x) in training, each m 0 or 1; x <- (1 - rate) x + F(x) outside of it.

    >>> from resstream import lab
    >>> net = lab.mlp(lab.DropoutSkip(0.5), depth=4)
    >>> tokens = net.tokenize(torch.tensor([[5, 7]]))
    >>> bool((net.forward(tokens, torch.Generator().manual_seed(0)) == net.forward(tokens)).any())
    False

    So in expectation the skip has the factor 1 - rate, in training too: numbers that are kept are not enlarged.

    Attributes:
        rate: the probability that a number of the stream is dropped at a step.

    Source:
        He et al. 2016, Identity mappings in deep residual networks, section 3.1, "dropout shortcut".
    """

    rate: float = 0.5

    def __post_init__(self) -> None:
        share("rate", self.rate)

    def prepare(self, weights: Weights, place: Place, batch: Batch) -> Weights:
        """In training, which numbers are kept."""
        if batch.noise is None:
            return weights
        return {**weights, "kept": _kept(1 - self.rate, batch.shape, batch.noise)}

    def carry(self, weights: Weights, place: Place) -> Carry:
        """What is kept, or the share of it outside of training."""
        if "kept" in weights:
            return Carry(before=lambda x: weights["kept"].to(x) * x)
        return Carry(before=lambda x: (1 - self.rate) * x)


@final
@dataclass(frozen=True)
class StochasticDepth(Rule):
    """Steps left out at random: x <- x + b F(x) in training, b 0 or 1 for each prompt; x <- x + p F(x) outside of it.

    >>> from resstream import lab
    >>> net = lab.mlp(lab.StochasticDepth(0.5), depth=4)
    >>> trunk = net.trunk(net.tokenize(torch.tensor([[5, 7]])))
    >>> [float(trunk.prepared[site]["kept"]) for site in net.design.sites]
    [0.875, 0.75, 0.625, 0.5]

    The probability p that step l of n is kept falls linearly, p = 1 - (l / n) (1 - survival), from 1 before the first.

    Attributes:
        survival: p of the last step.

    Source:
        Huang et al. 2016, Deep networks with stochastic depth, section 3.
    """

    survival: float = 0.5

    def __post_init__(self) -> None:
        share("survival", self.survival, above_zero=True)

    def prepare(self, weights: Weights, place: Place, batch: Batch) -> Weights:
        """In training, which prompts keep the step; outside of it, the probability that they do."""
        probability = 1 - (place.step + 1) / place.steps * (1 - self.survival)
        if batch.noise is None:
            return {**weights, "kept": torch.tensor(probability, dtype=torch.float64)}
        return {**weights, "kept": _kept(probability, torch.Size((batch.shape[0], 1, 1)), batch.noise)}

    def write(
        self, y: Float[Tensor, "batch pos width"], x: Float[Tensor, "batch pos width"], weights: Weights
    ) -> Float[Tensor, "batch pos width"]:
        """What is left of the branch."""
        return weights["kept"].to(y) * y


def _kept(probability: float, shape: torch.Size, noise: torch.Generator) -> Float[Tensor, ...]:
    """Ones with a probability, and zeros."""
    return (torch.rand(shape, generator=noise, device=noise.device, dtype=torch.float64) < probability).double()
