"""What a residual rule is: how one step of a stack joins what a branch writes to the stream that passes by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from resstream.models.carry import UNCHANGED, Carry

Weights: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True)
class Place:
    """Which step of which stack a rule is asked about.

    >>> from resstream import lab
    >>> net = lab.transformer("residual", layers=3)
    >>> place = net.design.place(net.site("1.mlp"))
    >>> place.step, place.steps, place.pairs
    (3, 6, 3.0)

    Attributes:
        step: the step, counted from 0.
        steps: how many steps the stack has: one for each branch.
        layer: the layer that the step belongs to, counted from 0.
        layers: how many layers the stack has.
        width: how many numbers the stream has.
        matrices: how many matrices the step's branch applies one after the other.
        returned: how many numbers the step's branch returns at each position.
    """

    step: int
    steps: int
    layer: int
    layers: int
    width: int
    matrices: int
    returned: int

    @property
    def pairs(self) -> float:
        """The depth N of the papers: how many layers of two branches each the stack has, or would have."""
        return self.steps / 2


@dataclass(frozen=True)
class Batch:
    """What a rule may need to know of the batch that runs, besides its stream.

    >>> Batch(torch.Size((2, 3, 8))).noise is None
    True

    Attributes:
        shape: of the stream: batch, positions, width.
        condition: one vector for each prompt, which a conditioned rule reads.
        noise: where a rule in training draws from; None outside of training.
    """

    shape: torch.Size
    condition: Float[Tensor, "batch width"] | None = None
    noise: torch.Generator | None = None


class Rule:
    """One step of a stack: x <- after(before(x) + write(F(read(x)), x)), in which F is the branch.

    A rule is a value without weights of its own: what it learns, it hands out as a mapping at the start, and is handed
    back in every call. The methods here are those of the plain sum, x <- x + F(x); a rule overrides what differs.

    >>> from resstream import lab
    >>> class Halved(lab.Rule):
    ...     def write(self, y, x, weights):
    ...         return 0.5 * y
    >>> lab.mlp(Halved(), depth=4).check.passed
    True

    Attributes:
        conditioned: whether the rule reads a vector for each prompt.
    """

    conditioned: ClassVar[bool] = False

    @property
    def normed(self) -> bool:
        """Whether the stack ends with a LayerNorm before its readout."""
        return False

    @property
    def projects(self) -> bool:
        """Whether the rule brings what a branch returns to the width of the stream, if it has another."""
        return False

    def start(self, place: Place, rng: torch.Generator) -> Weights:
        """What the step learns, at its values before training, in float64."""
        return {}

    def gain(self, weight: str, place: Place) -> float:
        """The factor on the random start of a branch's weight: "q", "k", "v", "o", "in" or "out"."""
        return 1.0

    def end_gain(self, weight: str, place: Place) -> float:
        """The factor on the random start of a weight at the ends: "embed", "position" or "unembed".

        The place is the first step's.
        """
        return 1.0

    def prepare(self, weights: Weights, place: Place, batch: Batch) -> Weights:
        """The weights for one batch, with what depends on the batch but not on the stream."""
        return weights

    def read(self, x: Float[Tensor, "batch pos width"], weights: Weights) -> Float[Tensor, "batch pos width"]:
        """What the branch reads of the stream."""
        return x

    def write(
        self, y: Float[Tensor, "batch pos returned"], x: Float[Tensor, "batch pos width"], weights: Weights
    ) -> Float[Tensor, "batch pos width"]:
        """What is added to the stream `x`, when the branch returned `y`."""
        return y

    def carry(self, weights: Weights, place: Place) -> Carry:
        """What becomes of the stream itself on its way past the branch, and after the sum."""
        return UNCHANGED


def norm_start(width: int, name: str = "norm") -> Weights:
    """The weight and the shift of a LayerNorm before training."""
    return {
        f"{name}.weight": torch.ones(width, dtype=torch.float64),
        f"{name}.bias": torch.zeros(width, dtype=torch.float64),
    }


def drawn(rows: int, columns: int, std: float, rng: torch.Generator) -> Float[Tensor, "rows columns"]:
    """A matrix of independent normal numbers, x @ W, of standard deviation std / sqrt(rows)."""
    return std / math.sqrt(rows) * torch.randn(rows, columns, generator=rng, dtype=torch.float64)


def layer_norm(x: Float[Tensor, "*batch width"], weights: Weights, name: str = "norm") -> Float[Tensor, "*batch width"]:
    """LayerNorm over the last axis, with the weight and shift of that name.

    >>> x = torch.tensor([1.0, 3.0])
    >>> layer_norm(x, {"norm.weight": torch.ones(2), "norm.bias": torch.zeros(2)}).round(decimals=3)
    tensor([-1.,  1.])
    """
    return functional.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])
