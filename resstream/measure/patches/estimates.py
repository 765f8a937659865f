"""First-order estimates: what moving a value does to a score, as its slope says, by part and choice of positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from resstream.measure.metrics import wide
from resstream.models.trunk import ResidualModel
from resstream.sites import KINDS, Site
from resstream.stream.rows import Base


def estimates(
    kind: str,
    move: Float[Tensor, "pair ..."],
    slope: Float[Tensor, "pass score pair ..."],
    masks: Bool[Tensor, "column pair pos"],
) -> Float[Tensor, "pass score pair part column"]:
    """The sum of move times slope over all that a cell holds, in float32 or wider.

    >>> ones = torch.ones(1, 3, 2)
    >>> estimates("resid_pre", ones, ones[None, None], torch.tensor([[[True, True, False]]])).flatten()
    tensor([4.])

    Args:
        kind: the kind of site, which says where its positions and parts are; a state or write has one part.
        move: how far each value is moved.
        slope: how the scores move with it.
        masks: for each choice of positions, which of each pair's it means.
    """
    product = wide(slope) * wide(move)
    if kind == "pattern":
        by_position = product.sum(-1)
    elif kind == "neuron":
        by_position = product.transpose(-1, -2)
    elif kind in KINDS:
        by_position = product.sum(-1).unsqueeze(-2)
    else:
        by_position = product.sum(-1).transpose(-1, -2)
    return torch.einsum("smbnp,cbp->smbnc", by_position, masks.to(product))


def through_softmax(
    model: ResidualModel,
    base: Base,
    site: Site,
    prompts: Sequence[int],
    other: Float[Tensor, "pair pos head d_head"],
    slope: Float[Tensor, "pass score pair pos query_head d_head"],
    masks: Bool[Tensor, "column pair pos"],
    rows: int,
) -> Float[Tensor, "pass score pair part column"]:
    """The estimate for queries or keys whose attention pattern is computed anew, so that no softmax is made a line.

    The other value is put in, attention is run again up to its z, and only from there on the slope takes over. A query
    moves nothing but the z of its own position and head, so all of them are put in together; a key moves the z of
    every later position, so each choice of positions is a run of its own. Heads do not see each other either way.

    Args:
        model: the model that runs.
        base: the runs, with the values at the site.
        site: the queries or the keys of a layer.
        prompts: the run of each pair that is patched.
        other: the value that is put in.
        slope: how the scores move with the layer's z.
        masks: for each choice of positions, which of each pair's it means.
        rows: how many runs there may be at once.
    Source:
        Kramár et al. 2024, section 3.1.1.
    """
    own = base.values[site][list(prompts)]
    before = _z(model, base, site, prompts, own)
    if site.kind == "q":
        return estimates("z", wide(_z(model, base, site, prompts, other)) - wide(before), slope, masks)
    groups = model.parts["k"]
    found = []
    size = max(1, rows // len(prompts))
    for some in masks.split(size):
        put = torch.where(some[..., None, None], other, own)
        after = _z(model, base, site, [*prompts] * len(some), put.flatten(0, 1)).unflatten(0, some.shape[:2])
        by_head = torch.einsum("smbphd,cbphd->smbhc", wide(slope), wide(after) - wide(before))
        found.append(by_head.unflatten(-2, (groups, -1)).sum(-2))
    return torch.cat(found, dim=-1)


def _z(
    model: ResidualModel, base: Base, site: Site, prompts: Sequence[int], put: Float[Tensor, "row pos head d_head"]
) -> Float[Tensor, "row pos query_head d_head"]:
    """What attention's output projection reads when the queries or keys of a layer are others."""
    seen: list[Tensor] = []

    def read(z: Tensor) -> Tensor:
        seen.append(z)
        return z

    with torch.no_grad():
        trunk = model.trunk(base.tokens.take(prompts))
        x = base.values[Site(site.layer, "resid_pre")][list(prompts)]
        trunk.write(Site(site.layer, "attn"), x, {site.kind: lambda own: put.to(own), "z": read})
    return seen[0]
