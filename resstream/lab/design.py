"""The design of a toy net: its rule, branches and ends, and how its weights are drawn before training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from resstream.errors import LabError, listed
from resstream.lab.branches import Attention, Branch
from resstream.lab.ends import Ends
from resstream.lab.require import whole
from resstream.lab.rules.base import Place, Rule, Weights, norm_start
from resstream.sites import WRITES, Site


@dataclass(frozen=True)
class Design:
    """What a net is made of, without its weights.

    >>> from resstream import lab
    >>> design = Design(lab.PreLN(), {"mlp": lab.Perceptron()}, layers=2, width=8, ends=lab.Words(10))
    >>> lab.Net(design, design.start(seed=0, dtype=torch.float32)).dtype
    torch.float32

    Attributes:
        rule: how each step joins what its branch writes.
        branches: what each layer's branches compute, by the kind of their write: "mlp", or "attn" and "mlp".
        layers: how many layers there are.
        width: how many numbers the stream has.
        ends: embedding and unembedding.
    """

    rule: Rule
    branches: Mapping[str, Branch]
    layers: int
    width: int
    ends: Ends

    def __post_init__(self) -> None:
        whole("layers", self.layers)
        whole("width", self.width)
        if tuple(self.branches) not in (("mlp",), WRITES):
            raise LabError(
                f"branches of the kinds {listed(self.branches)} make no layer; give 'mlp' alone, or 'attn' and 'mlp'"
            )
        if isinstance(self.branches["mlp"], Attention):
            raise LabError(
                'an attention branch stands in the place of "mlp"; build the net with lab.transformer, and give it as '
                "attention="
            )
        attention = self.branches.get("attn")
        if isinstance(attention, Attention) and self.width % attention.heads:
            raise LabError(
                f"a stream of {self.width} numbers cannot be divided among {attention.heads} heads; "
                f"give a width such as {attention.heads * max(1, self.width // attention.heads)}"
            )
        for kind, branch in self.branches.items():
            returned = branch.returned(self.width)
            if returned != self.width and not self.rule.projects:
                raise LabError(
                    f'the "{kind}" branches return {returned} numbers, which {self.rule} cannot add to a stream of '
                    f"{self.width}; give width={returned}, branches that return {self.width}, or a rule that "
                    "projects, such as Switchable(projection=True)"
                )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of a layer's writes, in their order."""
        return tuple(self.branches)

    def place(self, site: Site) -> Place:
        """What the rule may know of one step."""
        branch = self.branches[site.kind]
        return Place(
            step=site.layer * len(self.kinds) + self.kinds.index(site.kind),
            steps=self.layers * len(self.kinds),
            layer=site.layer,
            layers=self.layers,
            width=self.width,
            matrices=branch.matrices,
            returned=branch.returned(self.width),
        )

    def start(self, seed: int, dtype: torch.dtype) -> Weights:
        """The weights before training: a generator of its own draws the ends, then step after step, in float64."""
        rng = torch.Generator().manual_seed(seed)
        first = self.place(self.sites[0])
        drawn = self.ends.start(self.width, rng)
        ends = {name: self.rule.end_gain(name, first) * value for name, value in drawn.items()}
        if self.rule.normed:
            ends |= norm_start(self.width)
        if self.rule.conditioned:
            ends["condition"] = torch.randn(self.ends.vocab_size, self.width, generator=rng, dtype=torch.float64)
        found = {f"ends.{name}": value for name, value in ends.items()}
        for site in self.sites:
            place = self.place(site)
            branch = self.branches[site.kind].start(self.width, rng, partial(self.rule.gain, place=place))
            learnt = self.rule.start(place, rng)
            if both := branch.keys() & learnt.keys():
                raise LabError(
                    f"{self.rule} and the branch at {site} both have a weight {listed(sorted(both))}; give the rule's "
                    "another name"
                )
            found |= {f"{site}.{name}": value for name, value in {**branch, **learnt}.items()}
        return {name: value.to(dtype) for name, value in found.items()}

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """All writes, in their order."""
        return tuple(Site(layer, kind) for layer in range(self.layers) for kind in self.kinds)
