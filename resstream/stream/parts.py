"""Values inside a branch as tensors with parts: along which axes positions and parts lie, one part out and back in."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from resstream.sites import Site


def part_of(value: Float[Tensor, "batch ..."], site: Site) -> Float[Tensor, "batch ..."]:
    """The part of a whole value that a site names; the whole value if it names none.

    >>> part_of(torch.zeros(2, 5, 9, 64), Site(7, "z", 3)).shape
    torch.Size([2, 5, 64])
    """
    return value if site.part is None else value.select(_part_axis(site), site.part)


def with_part(value: Float[Tensor, "batch ..."], site: Site, part: Float[Tensor, "batch ..."]) -> Tensor:
    """The whole value with another part where a site names one.

    >>> with_part(torch.zeros(1, 2, 3), Site(7, "neuron", 1), torch.ones(1, 2))
    tensor([[[0., 1., 0.],
             [0., 1., 0.]]])
    """
    if site.part is None:
        return part
    place = torch.tensor([site.part], device=value.device)
    return value.index_copy(_part_axis(site), place, part.unsqueeze(_part_axis(site)))


def at_positions(mask: Bool[Tensor, "batch pos"], value: Tensor, site: Site) -> Bool[Tensor, "batch ..."]:
    """A mask of positions in the shape that spreads over what is at a site; a pattern's positions are its queries.

    >>> at_positions(torch.ones(2, 5, dtype=torch.bool), torch.zeros(2, 9, 5, 5), Site(7, "pattern")).shape
    torch.Size([2, 1, 5, 1])
    """
    axis = position_axis(site)
    return mask.reshape(mask.shape[0], *[1] * (axis - 1), mask.shape[1], *[1] * (value.ndim - axis - 1))


def position_axis(site: Site) -> int:
    """The axis along which the positions of what is at a site lie.

    >>> position_axis(Site(7, "z")), position_axis(Site(7, "pattern")), position_axis(Site(7, "pattern", 3))
    (1, 2, 1)
    """
    return 2 if site == Site(site.layer, "pattern") else 1


def _part_axis(site: Site) -> int:
    return 1 if site.kind == "pattern" else 2
