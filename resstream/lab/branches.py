"""What a branch computes: one layer of weights, a perceptron, or attention, with its weights at the start."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from resstream.lab.require import number, one_of, whole
from resstream.lab.rules.base import Weights, drawn
from resstream.models.trunk import Inside

Activation: TypeAlias = Literal["tanh", "relu", "gelu", "none"]
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "none": lambda x: x,
}


class Branch(ABC):
    """The F of a rule: a function of the stream with weights that a rule may scale at the start.

    >>> from resstream import lab
    >>> isinstance(lab.Attention(heads=2), lab.Branch)
    True
    """

    @property
    @abstractmethod
    def matrices(self) -> int:
        """How many matrices are applied one after the other."""

    def returned(self, width: int) -> int:
        """How many numbers the branch returns at each position, from a stream of that width: as many, or others."""
        return width

    @abstractmethod
    def start(self, width: int, rng: torch.Generator, gain: Callable[[str], float]) -> Weights:
        """The weights before training, in float64; `gain` is the rule's factor on each."""

    @abstractmethod
    def apply(
        self, x: Float[Tensor, "batch pos width"], weights: Weights, mask: Bool[Tensor, "batch pos"], inside: Inside
    ) -> Float[Tensor, "batch pos returned"]:
        """What the branch returns; `mask` is true at real tokens, and values pass through the functions of `inside`."""

    def parts(self, width: int) -> Mapping[str, int]:
        """How many parts of each kind can be told apart inside: none, unless their last matrix is "out" or "o"."""
        return {}


@final
@dataclass(frozen=True)
class Layer(Branch):
    """One layer of weights: F(h) = f(h W), W ~ N(0, std^2 / width), with a bias that starts at zero.

    >>> from resstream import lab
    >>> lab.mlp("plain", depth=2, width=8, branch=lab.Layer("relu")).weights["1.mlp.out"].shape
    torch.Size([8, 8])

    Attributes:
        activation: f.
        std: standard deviation of the weights at the start, in units of 1 / sqrt(width).
    """

    activation: Activation = "tanh"
    std: float = 1.0

    def __post_init__(self) -> None:
        one_of("activation", self.activation, _ACTIVATIONS)
        number("std", self.std)

    @property
    def matrices(self) -> int:
        """One."""
        return 1

    def start(self, width: int, rng: torch.Generator, gain: Callable[[str], float]) -> Weights:
        """The matrix and its bias."""
        return {"out": gain("out") * drawn(width, width, self.std, rng), "out.bias": _zeros(width)}

    def apply(
        self, x: Float[Tensor, "batch pos width"], weights: Weights, mask: Bool[Tensor, "batch pos"], inside: Inside
    ) -> Float[Tensor, "batch pos width"]:
        """The matrix, then the activation."""
        return _ACTIVATIONS[self.activation](x @ weights["out"] + weights["out.bias"])


@final
@dataclass(frozen=True)
class Perceptron(Branch):
    """Two layers of weights: F(h) = f(h W1) W2, with biases that start at zero.

    >>> from resstream import lab
    >>> lab.mlp("residual", depth=2, width=8, branch=lab.Perceptron(hidden=32)).parts
    {'neuron': 32}

    Attributes:
        hidden: number of neurons; as many as the stream is wide if None.
        activation: f.
        std: standard deviations of W1 and W2 at the start, in units of 1 / sqrt(numbers that they read).
        out: how many numbers it returns at each position; as many as the stream is wide if None. Another number needs
            a rule that projects it, such as Switchable(projection=True).
    """

    hidden: int | None = None
    activation: Activation = "tanh"
    std: tuple[float, float] = (1.0, 1.0)
    out: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "out"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name))
        one_of("activation", self.activation, _ACTIVATIONS)
        for std in self.std:
            number("std", std)

    @property
    def matrices(self) -> int:
        """Two."""
        return 2

    def returned(self, width: int) -> int:
        """As many as it was told to return, or as many as the stream has."""
        return self.out or width

    def start(self, width: int, rng: torch.Generator, gain: Callable[[str], float]) -> Weights:
        """Both matrices and their biases."""
        hidden, out = self.hidden or width, self.returned(width)
        return {
            "in": gain("in") * drawn(width, hidden, self.std[0], rng),
            "in.bias": _zeros(hidden),
            "out": gain("out") * drawn(hidden, out, self.std[1], rng),
            "out.bias": _zeros(out),
        }

    def apply(
        self, x: Float[Tensor, "batch pos width"], weights: Weights, mask: Bool[Tensor, "batch pos"], inside: Inside
    ) -> Float[Tensor, "batch pos returned"]:
        """Up, the activation, and down."""
        neurons = _ACTIVATIONS[self.activation](x @ weights["in"] + weights["in.bias"])
        return _passed(inside, "neuron", neurons) @ weights["out"] + weights["out.bias"]

    def parts(self, width: int) -> Mapping[str, int]:
        """The neurons."""
        return {"neuron": self.hidden or width}


@final
@dataclass(frozen=True)
class Attention(Branch):
    """Multi-head attention: softmax(q k^T / sqrt(d)) v, projected back to the stream.

    >>> import resstream as rs
    >>> from resstream import lab
    >>> net = lab.transformer("pre_ln", layers=2, width=8, attention=lab.Attention(heads=2, sharpness=0.0))
    >>> rs.read(net, torch.tensor([[5, 7]]), sites="pattern")["1.pattern"][0, 0]
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]], dtype=torch.float64)

    Attributes:
        heads: number of heads, which the width is divided among.
        causal: whether a position reads no later one.
        std: standard deviation of the weights at the start, in units of 1 / sqrt(width).
        sharpness: a factor on the scores; attention is uniform at 0, and picks one key where it is large.
    """

    heads: int = 4
    causal: bool = True
    std: float = 1.0
    sharpness: float = 1.0

    def __post_init__(self) -> None:
        whole("heads", self.heads)
        number("std", self.std)
        number("sharpness", self.sharpness)

    @property
    def matrices(self) -> int:
        """Two: a value's and the output's."""
        return 2

    def start(self, width: int, rng: torch.Generator, gain: Callable[[str], float]) -> Weights:
        """The four projections."""
        return {name: gain(name) * drawn(width, width, self.std, rng) for name in ("q", "k", "v", "o")}

    def apply(
        self, x: Float[Tensor, "batch pos width"], weights: Weights, mask: Bool[Tensor, "batch pos"], inside: Inside
    ) -> Float[Tensor, "batch pos width"]:
        """Queries against keys, and the values that they choose."""
        q, k, v = (
            _passed(inside, name, (x @ weights[name]).unflatten(-1, (self.heads, -1))) for name in ("q", "k", "v")
        )
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (self.sharpness / math.sqrt(q.shape[-1]))
        allowed = mask[:, None, None]
        if self.causal:
            allowed = allowed & torch.ones(2 * (x.shape[1],), dtype=torch.bool, device=x.device).tril()
        pattern = _passed(inside, "pattern", scores.masked_fill(~allowed, -torch.inf).softmax(-1))
        z = _passed(inside, "z", torch.einsum("bhqk,bkhd->bqhd", pattern, v))
        return z.flatten(2) @ weights["o"]

    def parts(self, width: int) -> Mapping[str, int]:
        """The heads, and what each of them holds."""
        return dict.fromkeys(("head", "z", "q", "k", "v", "pattern"), self.heads)


def _zeros(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.float64)


def _passed(inside: Inside, kind: str, value: Tensor) -> Tensor:
    return inside[kind](value) if kind in inside else value
