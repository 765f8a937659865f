"""The trunk step by step: what each step reads, what its branches write, and the stream that it leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from jaxtyping import Float
from torch import Tensor

from resstream.errors import UnsupportedModelError
from resstream.models.carry import Carry
from resstream.models.trunk import ResidualModel, Trunk
from resstream.sites import Site


@dataclass(frozen=True)
class Stride:
    """One step of a trunk.

    Attributes:
        sites: the writes that read the same state.
        x: that state.
        written: what each of them adds to it, in the shape in which its branch returned it.
        pattern: the attention pattern, "batch head query key", if there is attention among them and it was asked for.
        carry: what becomes of the stream itself.
    """

    sites: tuple[Site, ...]
    x: Float[Tensor, "batch pos d_model"]
    written: Mapping[Site, Tensor]
    pattern: Float[Tensor, "batch head query key"] | None
    carry: Carry

    @property
    def total(self) -> Float[Tensor, "batch pos d_model"]:
        """What all branches of the step add."""
        return sum(self.written.values(), torch.zeros_like(self.x))

    @cached_property
    def after(self) -> Float[Tensor, "batch pos d_model"]:
        """The stream after the step."""
        return self.carry.add(self.x, self.total)


def walk(model: ResidualModel, trunk: Trunk, *, patterns: bool = False) -> Iterator[Stride]:
    """Run a trunk write by write, each branch once, and hold no more than a step of it.

    >>> import resstream as rs
    >>> model = rs.load("smollm2")
    >>> with torch.no_grad():
    ...     strides = list(walk(model, model.trunk(model.tokenize("Hello there"))))
    >>> len(strides), [str(site) for site in strides[1].sites]
    (60, ['0.mlp'])

    Args:
        model: whose trunk it is.
        trunk: opened for a batch.
        patterns: whether to keep attention patterns, of a model in which they can be told apart.
    Raises:
        UnsupportedModelError: a write that cannot be added to the stream.
    """
    x = trunk.x0
    for step in model.steps:
        seen: dict[str, Tensor] = {}
        written = {}
        for site in step:
            if patterns and site.kind == "attn":
                written[site] = trunk.write(site, x, {"pattern": partial(seen.setdefault, "pattern")})
            else:
                written[site] = trunk.write(site, x)
        _require_fitting(model, written, x)
        stride = Stride(step, x, written, seen.get("pattern"), model.carry(step))
        yield stride
        x = stride.after


def states_of(model: ResidualModel) -> list[Site]:
    """The states that the stream passes through, each once: what each step reads, and what the last one leaves.

    >>> import resstream as rs
    >>> [str(site) for site in states_of(rs.load("smollm2"))[:3]]
    ['0.resid_pre', '0.resid_mid', '1.resid_pre']
    """
    layers = [step[0].layer for step in model.steps]
    starts = [layer != before for layer, before in zip(layers, [None, *layers], strict=False)]
    reads = [Site(layer, "resid_pre" if start else "resid_mid") for layer, start in zip(layers, starts, strict=True)]
    return [*reads, Site(model.n_layers - 1, "resid_post")]


def _require_fitting(model: ResidualModel, written: Mapping[Site, Tensor], x: Tensor) -> None:
    """Refuse a write that is larger than the stream; a smaller one may still be spread over it."""
    for site, value in written.items():
        try:
            value.expand_as(x)
        except RuntimeError as error:
            raise UnsupportedModelError(
                f'"{site}" of {model.name} writes {list(value.shape)} to a stream of {list(x.shape)}; '
                "project it to the stream's shape"
            ) from error
