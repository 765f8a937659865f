"""The inside of a toy net's branches: what each head adds to the stream, and the proof of where values are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from resstream.check import Check
from resstream.models.frozen import frozen
from resstream.models.trunk import TOLERANCE, relative_distance, worst_of
from resstream.sites import Site

if TYPE_CHECKING:
    from resstream.lab.nets import Net
    from resstream.lab.opened import NetTrunk

_KINDS = {
    "softmax(q k) = pattern": ("q", "k", "pattern"),
    "pattern times v = z": ("v",),
    "z through the last matrix = attention write": ("z",),
    "heads = attention write, but for a constant": ("head",),
    "neurons through the last matrix = MLP write": ("neuron",),
}


def head_writes(
    trunk: NetTrunk, layer: int, z: Float[Tensor, "batch pos head d_head"]
) -> Float[Tensor, "batch pos head d_model"]:
    """What each head adds to the stream by its z: its rows of the projection, and what the rule makes of them.

    That is right for rules whose write does not look at the stream; the proof finds out.
    """
    site = Site(layer, "attn")
    rule, weights = trunk.net.design.rule, trunk.prepared[site]
    each = torch.einsum("bphd,hdm->hbpm", z, weights["o"].unflatten(0, z.shape[2:]))
    with torch.enable_grad(), frozen("slope"):
        y = each.sum(0).detach().requires_grad_()
        pulled = torch.zeros_like(y, requires_grad=True)
        written = rule.write(y, torch.zeros_like(y), weights)
        (back,) = torch.autograd.grad(written, y, pulled, create_graph=True)
        # With scales held the rule is linear, and pulling back is linear too: its transpose pushes each head forward.
        heads = [torch.autograd.grad(back, pulled, head, retain_graph=True)[0] for head in each]
    return torch.stack(heads, dim=2)


def prove_inside(net: Net) -> Mapping[str, Check]:
    """Measure, in every layer, the identity that holds between the values inside the branches and their writes."""
    ids = torch.randint(net.vocab_size, (1, min(3, net.max_positions or 3)), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        trunk = net.trunk(net.tokenize(ids.to(net.device)))
        x, errors = trunk.x0, {name: dict[str, float]() for name in _KINDS}
        for layer in trunk.order:
            for name, error in _errors(trunk, layer, x).items():
                errors[name][f"layer {layer}"] = error
            x = trunk.layer(layer, x)
    checks: dict[str, Check] = {}
    for name, found in errors.items():
        if found:
            where = worst_of(found)
            check = Check(name, found[where], TOLERANCE[net.dtype], where=where)
            checks |= dict.fromkeys(_KINDS[name], check)
    return checks


def _errors(trunk: NetTrunk, layer: int, x: Tensor) -> dict[str, float]:
    """How far each identity is off in one layer."""
    design, seen, found = trunk.net.design, dict[str, Tensor](), dict[str, float]()
    qk, vz, zo, heads, neurons = _KINDS
    for kind in design.kinds:
        site = Site(layer, kind)
        parts, weights = design.branches[kind].parts(trunk.net.d_model), trunk.prepared[site]
        written = trunk.write(site, x, {part: partial(_note, seen, part) for part in parts if part != "head"})
        if {"q", "k", "v", "pattern", "z"} <= set(parts):
            scores = torch.einsum("bqhd,bkhd->bhqk", seen["q"], seen["k"])
            # Where a key may be read, the logarithm of the pattern is the score, but for a constant of its row.
            gaps = seen["pattern"].log() - scores * _sharpness(trunk) / math.sqrt(seen["q"].shape[-1])
            gaps = gaps - gaps[..., :1]
            found[qk] = float(gaps[seen["pattern"] > 0].abs().max())
            mixed = torch.einsum("bhqk,bkhd->bqhd", seen["pattern"], seen["v"])
            found[vz] = relative_distance(mixed, seen["z"])
            found[zo] = relative_distance(design.rule.write(seen["z"].flatten(2) @ weights["o"], x, weights), written)
            rest = written - trunk.head_writes(layer, seen["z"]).sum(2)
            found[heads] = float((rest - rest[:, :1]).abs().max() / written.abs().max().clamp_min(1e-30))
        if "neuron" in parts:
            y = seen["neuron"] @ weights["out"] + weights["out.bias"]
            found[neurons] = relative_distance(design.rule.write(y, x, weights), written)
        x = design.rule.carry(weights, design.place(site)).add(x, written)
    return found


def _sharpness(trunk: NetTrunk) -> float:
    return float(getattr(trunk.net.design.branches["attn"], "sharpness", 1.0))


def _note(seen: dict[str, Tensor], kind: str, value: Tensor) -> Tensor:
    seen[kind] = value
    return value
