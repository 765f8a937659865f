"""Rules that learn how much of a branch is added: one number for each step, or one for each number of the stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor

from resstream.lab.require import number, one_of
from resstream.lab.rules.base import Place, Rule, Weights, layer_norm, norm_start


@final
@dataclass(frozen=True)
class ReZero(Rule):
    """A learnt factor that starts at zero, and no norm: x <- x + a F(x), a = 0.

    >>> from resstream import lab
    >>> net = lab.mlp("re_zero", depth=50)
    >>> tokens = net.tokenize(torch.tensor([[5, 7]]))
    >>> bool((net.forward(tokens) == net.trunk(tokens).x0).all())
    True

    Source:
        Bachlechner et al. 2021, ReZero is all you need: fast convergence at large depth. There both branches of a
        Transformer's layer share one factor; here each step has its own.
    """

    def start(self, place: Place, rng: torch.Generator) -> Weights:
        """The factor."""
        return {"factor": torch.zeros(1, dtype=torch.float64)}

    def write(
        self, y: Float[Tensor, "batch pos width"], x: Float[Tensor, "batch pos width"], weights: Weights
    ) -> Float[Tensor, "batch pos width"]:
        """The branch times its factor."""
        return weights["factor"] * y


@final
@dataclass(frozen=True)
class SkipInit(Rule):
    """A learnt factor in the place of a norm: x <- x + a F(x), a = 0 or 1 / sqrt(steps) at the start.

    >>> from resstream import lab
    >>> lab.mlp(lab.SkipInit("depth"), depth=16).weights["2.mlp.factor"]
    tensor([0.2500], dtype=torch.float64)

    Attributes:
        start_at: "zero", or "depth" for 1 / sqrt(steps).

    Source:
        De and Smith 2020, Batch normalization biases residual blocks towards the identity function in deep networks,
        "SkipInit".
    """

    start_at: Literal["zero", "depth"] = "zero"

    def __post_init__(self) -> None:
        one_of("start_at", self.start_at, ("zero", "depth"))

    def start(self, place: Place, rng: torch.Generator) -> Weights:
        """The factor."""
        factor = 0.0 if self.start_at == "zero" else place.steps**-0.5
        return {"factor": torch.full((1,), factor, dtype=torch.float64)}

    def write(
        self, y: Float[Tensor, "batch pos width"], x: Float[Tensor, "batch pos width"], weights: Weights
    ) -> Float[Tensor, "batch pos width"]:
        """The branch times its factor."""
        return weights["factor"] * y


@final
@dataclass(frozen=True)
class LayerScale(Rule):
    """A learnt factor for each number of the stream, small at the start: x <- x + s * F(LN(x)).

    >>> from resstream import lab
    >>> [float(lab.mlp("layer_scale", depth=depth).weights["0.mlp.scale"][0]) for depth in (18, 24, 36)]
    [0.1, 1e-05, 1e-06]

    Attributes:
        start_at: s at the start; by default 0.1 up to 18 layers, 1e-5 up to 24, and 1e-6 in deeper stacks.

    Source:
        Touvron et al. 2021, Going deeper with image Transformers, section 2.
    """

    start_at: float | None = None

    def __post_init__(self) -> None:
        if self.start_at is not None:
            number("start_at", self.start_at)

    @property
    def normed(self) -> bool:
        """It does."""
        return True

    def start(self, place: Place, rng: torch.Generator) -> Weights:
        """The factors, and the norm's weight and shift."""
        by_depth = 0.1 if place.layers <= 18 else 1e-5 if place.layers <= 24 else 1e-6
        scale = by_depth if self.start_at is None else float(self.start_at)
        return {"scale": torch.full((place.width,), scale, dtype=torch.float64), **norm_start(place.width)}

    def read(self, x: Float[Tensor, "batch pos width"], weights: Weights) -> Float[Tensor, "batch pos width"]:
        """The stream, normed."""
        return layer_norm(x, weights)

    def write(
        self, y: Float[Tensor, "batch pos width"], x: Float[Tensor, "batch pos width"], weights: Weights
    ) -> Float[Tensor, "batch pos width"]:
        """The branch times its factors."""
        return weights["scale"] * y
