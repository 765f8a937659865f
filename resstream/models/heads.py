"""What single heads add to the stream: their share of the output projection, and of what the block does after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from resstream.models.calls import Call, like, swap_forward
from resstream.models.frozen import frozen
from resstream.sites import Site

if TYPE_CHECKING:
    from resstream.models.causal_lm import CausalTrunk


def head_writes(
    trunk: CausalTrunk, layer: int, z: Float[Tensor, "batch pos head d_head"]
) -> Float[Tensor, "batch pos head d_model"]:
    """What each head adds to the stream: its rows of the output projection, times what the block makes of them."""
    projection = trunk.model.anatomy.branches[layer].projections["o"]
    rows = matrix_of(projection, z[0, 0].numel(), z).unflatten(0, z.shape[2:])
    factors = after_projection(trunk, Site(layer, "attn"), projected(projection, z.detach().flatten(2)))
    return torch.einsum("bphd,hdm->bphm", z, rows) * factors[:, :, None]


def after_projection(
    trunk: CausalTrunk, site: Site, y: Float[Tensor, "batch pos d_model"]
) -> Float[Tensor, "batch pos d_model"]:
    """The factors by which a branch's last projection reaches the stream: multipliers, and norms at their scale.

    What follows the projection acts on each number alone once scales are held, so its slopes are these factors.

    Args:
        trunk: the opened model.
        site: the branch, by its write.
        y: what the projection returns.
    """
    branches = trunk.model.anatomy.branches[site.layer]
    # Not attention's projection alone: attention itself would run, and leave keys and values of nothing behind.
    stand_in = branches.attn if site.kind == "attn" else branches.projections["out"]
    form = trunk.model.form_of(stand_in) if site.kind == "attn" else None
    with torch.enable_grad(), frozen("constant"):
        leaf = y.detach().requires_grad_()

        def forward(*args: Any, **kwargs: Any) -> Any:
            # A copy, because some blocks add in place, and some modules see batch and position as one axis.
            return like(form, leaf.clone().reshape(*Call.of(args, kwargs).stream.shape[:-1], -1))

        with swap_forward(stand_in, forward):
            written = trunk.write(site, torch.zeros_like(leaf))
        return torch.autograd.grad(written.sum(), leaf)[0]


def projected(projection: nn.Module, read: Float[Tensor, "batch pos column"]) -> Float[Tensor, "batch pos d_model"]:
    """What a projection makes of what it reads, in one shape: some modules see batch and position as one axis."""
    return projection(read).reshape(*read.shape[:-1], -1)


def matrix_of(projection: nn.Module, width: int, like: Tensor) -> Float[Tensor, "column d_model"]:
    """The matrix of a linear map that reads `width` columns, in the order input, output.

    >>> matrix_of(nn.Linear(3, 2), 3, torch.zeros(())).shape
    torch.Size([3, 2])

    A module that keeps its weights in another form, such as a quantised one, is asked for its matrix by running it.

    Args:
        projection: the map, or a bridge around it.
        width: how many numbers it reads.
        like: of the type and on the device of what it reads.
    """
    plain = getattr(projection, "original_component", projection)
    weight = getattr(plain, "weight", None)
    if isinstance(weight, Tensor) and weight.is_floating_point():
        if isinstance(plain, nn.Linear) and weight.shape[-1] == width:
            return weight.T
        if isinstance(plain, Conv1D) and weight.shape[0] == width:
            return weight
    rows = torch.eye(width, dtype=like.dtype, device=like.device)[None]
    return (projection(rows) - projection(torch.zeros_like(rows[:, :1])))[0]
