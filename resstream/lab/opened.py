"""The stream of a batch through a toy net, open at every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from resstream.lab.proof import head_writes
from resstream.lab.rules.base import Batch, Weights
from resstream.models.tokens import Tokens
from resstream.models.trunk import Inside, Trunk
from resstream.sites import Site

if TYPE_CHECKING:
    from resstream.lab.nets import Net


@dataclass(frozen=True)
class NetTrunk(Trunk):
    """The stream of a batch through a net.

    Attributes:
        net: the net.
        tokens: the batch.
        prepared: of each step, its weights with what the rule made of them for this batch.
    """

    net: Net
    tokens: Tokens
    prepared: Mapping[Site, Weights]

    @classmethod
    def of(cls, net: Net, tokens: Tokens, noise: torch.Generator | None = None) -> NetTrunk:
        """Open a net for a batch."""
        batch, rule = batch_of(net, tokens, noise), net.design.rule
        prepared = {site: rule.prepare(net.of(site), net.design.place(site), batch) for site in net.design.sites}
        return cls(net, tokens, prepared)

    @cached_property
    def x0(self) -> Float[Tensor, "batch pos d_model"]:  # type: ignore[override]
        """The embedding."""
        return self.net.design.ends.embed(self.tokens.ids, self.net.of("ends"))

    @property
    def order(self) -> Sequence[int]:  # type: ignore[override]
        """The layers as they are."""
        return range(self.net.n_layers)

    def layer(
        self, layer: int, x: Float[Tensor, "batch pos d_model"], inside: Inside | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """The stream after a layer's steps."""
        for kind in self.net.design.kinds:
            site = Site(layer, kind)
            carry = self.net.design.rule.carry(self.prepared[site], self.net.design.place(site))
            x = carry.add(x, self.write(site, x, inside))
        return x

    def write(
        self, site: Site, x: Float[Tensor, "batch pos d_model"], inside: Inside | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """What a branch adds; nothing, where the net has no such branch."""
        design = self.net.design
        if site.kind not in design.branches:
            return torch.zeros_like(x)
        weights = self.prepared[site]
        y = design.branches[site.kind].apply(design.rule.read(x, weights), weights, self.tokens.mask, inside or {})
        return design.rule.write(y, x, weights)

    def head_writes(
        self, layer: int, z: Float[Tensor, "batch pos head d_head"]
    ) -> Float[Tensor, "batch pos head d_model"]:
        """What each head adds to the stream by its z, as the slope of the whole write with scales held."""
        return head_writes(self, layer, z)


def batch_of(net: Net, tokens: Tokens, noise: torch.Generator | None) -> Batch:
    """What a rule may know of a batch in a net.

    >>> from resstream import lab
    >>> net = lab.mlp("residual", width=8)
    >>> batch_of(net, net.tokenize(torch.tensor([[5, 7]])), None).shape
    torch.Size([1, 2, 8])
    """
    shape = torch.Size((*tokens.ids.shape, net.d_model))
    weights = net.of("ends")
    condition = weights["condition"][tokens.ids[:, 0]] if net.design.rule.conditioned else None
    return Batch(shape, condition, noise)
