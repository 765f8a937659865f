"""One rule with switches: the norm before or after or not at all, ReZero's factor, and projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor

from resstream.lab.require import one_of
from resstream.lab.rules.base import Place, Rule, Weights, drawn, layer_norm, norm_start
from resstream.models.carry import UNCHANGED, Carry


@final
@dataclass(frozen=True)
class Switchable(Rule):
    """A step with switches: x <- N'(x P + a F(N(x)) Q), in which each of N', P, a, N and Q can be left out.

    >>> from resstream import lab
    >>> wide = lab.Perceptron(hidden=16, out=12)
    >>> net = lab.mlp(lab.Switchable("post", rezero=True, projection=True), depth=3, width=8, branch=wide)
    >>> sorted(name for name in net.weights if name.startswith("2.mlp") and "bias" not in name)
    ['2.mlp.factor', '2.mlp.in', '2.mlp.norm.weight', '2.mlp.out', '2.mlp.project', '2.mlp.skip']

    Attributes:
        norm: "pre" for N, with one more at the end of the stack; "post" for N'; "none".
        rezero: whether there is a learnt factor a, which is 0 at the start.
        projection: whether there are learnt matrices: P on the skip, which starts as the identity, and Q on a branch
            that returns another number of values than the stream has, which could not be added without it.

    Source:
        He et al. 2015, Deep residual learning, equation 2, for projections; the norms as in PreLN and PostLN, the
        factor as in ReZero.
    """

    norm: Literal["pre", "post", "none"] = "pre"
    rezero: bool = False
    projection: bool = False

    def __post_init__(self) -> None:
        one_of("norm", self.norm, ("pre", "post", "none"))

    @property
    def normed(self) -> bool:
        """It does where norms stand before the branches."""
        return self.norm == "pre"

    @property
    def projects(self) -> bool:
        """It does if it was given projections."""
        return self.projection

    def start(self, place: Place, rng: torch.Generator) -> Weights:
        """What the switches ask for."""
        found = {} if self.norm == "none" else dict(norm_start(place.width))
        if self.rezero:
            found["factor"] = torch.zeros(1, dtype=torch.float64)
        if self.projection:
            found["skip"] = torch.eye(place.width, dtype=torch.float64)
        if place.returned != place.width:
            found["project"] = drawn(place.returned, place.width, 1.0, rng)
        return found

    def read(self, x: Float[Tensor, "batch pos width"], weights: Weights) -> Float[Tensor, "batch pos width"]:
        """The stream, normed or as it is."""
        return layer_norm(x, weights) if self.norm == "pre" else x

    def write(
        self, y: Float[Tensor, "batch pos returned"], x: Float[Tensor, "batch pos width"], weights: Weights
    ) -> Float[Tensor, "batch pos width"]:
        """The branch, projected and scaled."""
        y = y @ weights["project"] if "project" in weights else y
        return weights["factor"] * y if self.rezero else y

    def carry(self, weights: Weights, place: Place) -> Carry:
        """The projection of the skip, and the norm after the sum."""
        if not self.projection and self.norm != "post":
            return UNCHANGED
        return Carry(
            before=(lambda x: x @ weights["skip"]) if self.projection else None,
            after=(lambda x: layer_norm(x, weights)) if self.norm == "post" else None,
        )
