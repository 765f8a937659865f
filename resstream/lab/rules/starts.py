"""Rules that are mostly a start: deep stacks without a norm whose first updates stay bounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from resstream.lab.rules.base import Place, Rule, Weights


@final
@dataclass(frozen=True)
class Fixup(Rule):
    """Branches that start at zero, and no norm: x <- x + s F(x + b) + b', s = 1, b = b' = 0.

    >>> from resstream import lab
    >>> net, same = lab.mlp("fixup", depth=25), lab.mlp("residual", depth=25)
    >>> [round(float((net.weights[name] / same.weights[name]).mean()), 4) for name in ("7.mlp.in", "7.mlp.out")]
    [0.2, 0.0]

    At the start the last matrix of each branch and the readout are zero, and the other matrices of a branch, which has
    m of them, are smaller by n^(-1 / (2 m - 2)) in a stack of n steps. So a step of gradient descent on the matrices
    changes what the net computes as much at any depth; biases, which the paper trains at a tenth of the rate, move it
    the more the deeper it is. The paper's scalar bias before an activation is here the vector that the branch has.

    Source:
        Zhang, Dauphin and Ma 2019, Fixup initialization: residual learning without normalization, section 3, rules
        1 to 3.
    """

    def start(self, place: Place, rng: torch.Generator) -> Weights:
        """The multiplier and the two biases."""
        return {
            "factor": torch.ones(1, dtype=torch.float64),
            "before": torch.zeros(1, dtype=torch.float64),
            "after": torch.zeros(1, dtype=torch.float64),
        }

    def gain(self, weight: str, place: Place) -> float:
        """Zero for the last matrix, a power of the depth for the others."""
        return 0.0 if weight in ("o", "out") else place.steps ** (-1 / (2 * place.matrices - 2))

    def end_gain(self, weight: str, place: Place) -> float:
        """Zero for the readout."""
        return 0.0 if weight == "unembed" else 1.0

    def read(self, x: Float[Tensor, "batch pos width"], weights: Weights) -> Float[Tensor, "batch pos width"]:
        """The stream and a bias."""
        return x + weights["before"]

    def write(
        self, y: Float[Tensor, "batch pos width"], x: Float[Tensor, "batch pos width"], weights: Weights
    ) -> Float[Tensor, "batch pos width"]:
        """The branch times its multiplier, and a bias."""
        return weights["factor"] * y + weights["after"]


@final
@dataclass(frozen=True)
class TFixup(Rule):
    """A start for Transformers without norms: x <- x + F(x), perceptrons, values and outputs by 0.67 N^(-1/4).

    >>> from resstream import lab
    >>> net, same = lab.transformer("t_fixup", layers=16), lab.transformer("residual", layers=16)
    >>> names = ("7.mlp.in", "7.attn.v", "7.attn.q", "ends.embed")
    >>> [round(float((net.weights[name] / same.weights[name]).mean()), 4) for name in names]
    [0.335, 0.335, 1.0, 0.0361]

    N counts layers of two branches each. Embeddings are smaller by (9N)^(-1/4) / sqrt(width); queries, keys and the
    readout are as they are. These are the paper's factors of an encoder, since no step here reads a second stream.

    Source:
        Huang et al. 2020, Improving Transformer optimization through better initialization, "T-Fixup".
    """

    def gain(self, weight: str, place: Place) -> float:
        """The factor of the encoder's values, outputs and perceptrons."""
        return 0.67 * place.pairs**-0.25 if weight in ("v", "o", "in", "out") else 1.0

    def end_gain(self, weight: str, place: Place) -> float:
        """The factor of the embeddings."""
        return 1.0 if weight == "unembed" else (9 * place.pairs) ** -0.25 * place.width**-0.5
