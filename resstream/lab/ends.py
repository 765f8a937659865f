"""The two ends of a toy net: how token ids become a stream, and how a stream becomes logits."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from resstream.errors import LabError
from resstream.lab.require import number, whole
from resstream.lab.rules.base import Weights, drawn

# The logit of what is never said: far enough down that its probability is zero in float64.
NEVER = -1e4


class Ends(ABC):
    """Embedding and unembedding; what stands between them is the stack.

    >>> from resstream import lab
    >>> isinstance(lab.Words(vocab=10), lab.Ends)
    True
    """

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def max_positions(self) -> int | None:
        """Longest prompt, or None where there is no limit."""
        return None

    @abstractmethod
    def start(self, width: int, rng: torch.Generator) -> Weights:
        """The weights before training, in float64."""

    @abstractmethod
    def embed(self, ids: Int[Tensor, "batch pos"], weights: Weights) -> Float[Tensor, "batch pos width"]:
        """The stream before the first layer."""

    @abstractmethod
    def logits(
        self, x: Float[Tensor, "*batch width"], weights: Weights, vocab: Sequence[int] | None
    ) -> Float[Tensor, "*batch vocab"]:
        """The logits of some token ids, or of all."""


@final
@dataclass(frozen=True)
class Words(Ends):
    """A vocabulary of random vectors, and a readout of its own.

    >>> from resstream import lab
    >>> lab.mlp("residual", ends=lab.Words(vocab=10, positions=4)).max_positions
    4

    Attributes:
        vocab: number of token ids.
        positions: longest prompt, each position with a vector that is added; no positions at all if None.
        std: standard deviation of each number of an embedding at the start.
        head_std: standard deviation of the readout's weights at the start, in units of 1 / sqrt(width).
    """

    vocab: int = 100
    positions: int | None = None
    std: float = 1.0
    head_std: float = 1.0

    def __post_init__(self) -> None:
        whole("vocab", self.vocab, 2)
        if self.positions is not None:
            whole("positions", self.positions)
        number("std", self.std)
        number("head_std", self.head_std)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.vocab

    @property
    def max_positions(self) -> int | None:
        """As many as have a vector."""
        return self.positions

    def start(self, width: int, rng: torch.Generator) -> Weights:
        """Embeddings, positions and readout."""

        def vectors(count: int) -> Tensor:
            return self.std * torch.randn(count, width, generator=rng, dtype=torch.float64)

        places = {} if self.positions is None else {"position": vectors(self.positions)}
        return {"embed": vectors(self.vocab), **places, "unembed": drawn(width, self.vocab, self.head_std, rng)}

    def embed(self, ids: Int[Tensor, "batch pos"], weights: Weights) -> Float[Tensor, "batch pos width"]:
        """The vectors of the tokens, and of their positions."""
        x = weights["embed"][ids]
        return x if self.positions is None else x + weights["position"][: ids.shape[1]]

    def logits(
        self, x: Float[Tensor, "*batch width"], weights: Weights, vocab: Sequence[int] | None
    ) -> Float[Tensor, "*batch vocab"]:
        """One matrix."""
        return x @ (weights["unembed"] if vocab is None else weights["unembed"][:, list(vocab)])


@final
@dataclass(frozen=True, eq=False)
class Points(Ends):
    """Points of a plane as tokens: the first ids are classes, which are said; the others are points, which are read.

    So a point and its class are a prompt of two tokens, whose next-token loss is the loss of the classification.

    >>> from resstream import lab
    >>> net = lab.mlp("residual", ends=lab.Points(torch.eye(2), classes=3))
    >>> net.vocab_size, net.logits(torch.tensor([[3], [4]])).softmax(-1)[..., 3:].max().item()
    (5, 0.0)

    Attributes:
        points: the points that can be read.
        classes: number of classes.
        head_std: standard deviation of the readout's weights at the start, in units of 1 / sqrt(width).
    """

    points: Float[Tensor, "point 2"]
    classes: int
    head_std: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.classes, bool) or not isinstance(self.classes, int) or self.classes < 2:
            raise LabError(f"classes={self.classes!r} leaves nothing to tell apart; give 2 or more")
        if self.points.ndim != 2 or self.points.shape[1] != 2 or not len(self.points):
            raise LabError(
                f"points of shape {tuple(self.points.shape)} are not points of a plane; give two numbers for each"
            )
        number("head_std", self.head_std)

    @property
    def vocab_size(self) -> int:
        """The classes and the points."""
        return self.classes + len(self.points)

    def start(self, width: int, rng: torch.Generator) -> Weights:
        """What turns a point into a stream, and a stream into classes."""
        return {
            "embed": math.sqrt(0.5) * torch.randn(2, width, generator=rng, dtype=torch.float64),
            "unembed": drawn(width, self.classes, self.head_std, rng),
        }

    def embed(self, ids: Int[Tensor, "batch pos"], weights: Weights) -> Float[Tensor, "batch pos width"]:
        """tanh(point W); a class, which is never read, stands at the origin."""
        origin = self.points.new_zeros(self.classes, 2)
        table = torch.cat([origin, self.points]).to(weights["embed"])
        return torch.tanh(table[ids] @ weights["embed"])

    def logits(
        self, x: Float[Tensor, "*batch width"], weights: Weights, vocab: Sequence[int] | None
    ) -> Float[Tensor, "*batch vocab"]:
        """The classes by one matrix; points are never said."""
        wanted = range(self.vocab_size) if vocab is None else list(vocab)
        if vocab is not None and max(wanted, default=0) < self.classes:
            return x @ weights["unembed"][:, wanted]
        said = x @ weights["unembed"]
        never = said.new_full((*said.shape[:-1], len(self.points)), NEVER)
        return torch.cat([said, never], dim=-1)[..., list(wanted)]
