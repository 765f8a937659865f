"""The proof that what was found inside a branch is what it is called: identities on a few random tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from resstream.check import Check
from resstream.models.frozen import frozen
from resstream.models.heads import after_projection, projected
from resstream.models.tokens import Tokens
from resstream.models.trunk import TOLERANCE, Inside, relative_distance, worst_of
from resstream.sites import Site

if TYPE_CHECKING:
    from resstream.models.causal_lm import CausalLM, CausalTrunk

_POSITIONS = 3
_SIGN = "the sign of {} moves the z of {} alone"
_NAMES = {
    "head": "each head's write = its z times the slope of the attention write, and with a bias they are the whole",
    "q": _SIGN.format("a query", "its head at its position"),
    "k": _SIGN.format("a key", "the heads that share it, from its position on,"),
    "v": _SIGN.format("a value", "the heads that share it, from its position on,"),
    "pattern": "pattern times v = z",
    "neuron": "down-projection of the neurons = MLP write, but for a constant",
}


def prove_inside(model: CausalLM) -> dict[str, Check]:
    """Measure, in every layer, the identity of each kind that the model has; errors are relative."""
    ids = torch.randint(model.vocab_size, (1, _POSITIONS), generator=torch.Generator().manual_seed(0)).to(model.device)
    checks = {}
    with torch.no_grad(), model.running():
        base = _opened(model, ids, 1)
        streams = [base.x0]
        for layer in base.order:
            streams.append(base.layer(layer, streams[-1]))
        for kind in [kind for kind in _NAMES if kind in model.parts]:
            probe = _probe(model, ids, kind)
            errors = {f"layer {layer}": probe(layer, x) for layer, x in enumerate(streams[:-1])}
            where = worst_of(errors)
            checks[kind] = Check(_NAMES[kind], errors[where], TOLERANCE[base.x0.dtype], where=where)
    return checks if "head" not in checks else {**checks, "z": checks["head"]}


def _probe(model: CausalLM, ids: Tensor, kind: str) -> Callable[[int, Tensor], float]:
    """A function from a layer, and the stream that it reads, to the error of a kind's identity there."""
    if kind in ("q", "k", "v"):
        return partial(_of_projections, _opened(model, ids, model.parts[kind]), kind)
    probes = {"head": _of_heads, "pattern": _of_pattern, "neuron": _of_neurons}
    return partial(probes[kind], _opened(model, ids, 1))


def _of_heads(trunk: CausalTrunk, layer: int, x: Tensor) -> float:
    """Heads against the slopes of the write that autograd finds, and what they leave over against a constant."""
    site = Site(layer, "attn")
    written, found = _values(trunk, site, x, "z")
    z = found["z"]
    heads = trunk.head_writes(layer, z)
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(layer)).to(x)
    with torch.enable_grad(), frozen("constant"):
        leaf = z.detach().requires_grad_()
        (slope,) = torch.autograd.grad((trunk.write(site, x, {"z": lambda _: leaf}) * weights).sum(), leaf)
    return max(
        relative_distance((heads * weights[:, :, None]).sum(-1), (slope * z).sum(-1)),
        _left_over(_Last(trunk, site, z.flatten(2)), written, heads.sum(2)),
    )


def _of_neurons(trunk: CausalTrunk, layer: int, x: Tensor) -> float:
    written, found = _values(trunk, Site(layer, "mlp"), x, "neuron")
    last = _Last(trunk, Site(layer, "mlp"), found["neuron"])
    return _left_over(last, written, (last.returned - last.bias) * last.factors)


@dataclass(frozen=True)
class _Last:
    """The last projection of a branch, with what it reads."""

    trunk: CausalTrunk
    site: Site
    read: Tensor

    @property
    def module(self) -> nn.Module:
        name = "o" if self.site.kind == "attn" else "out"
        return self.trunk.model.anatomy.branches[self.site.layer].projections[name]

    @property
    def returned(self) -> Tensor:
        return projected(self.module, self.read)

    @property
    def bias(self) -> Tensor:
        return projected(self.module, torch.zeros_like(self.read))

    @property
    def factors(self) -> Tensor:
        return after_projection(self.trunk, self.site, self.returned)


def _left_over(last: _Last, written: Tensor, parts: Tensor) -> float:
    """What a write has besides its parts and its projection's bias must be the same at every position."""
    rest = written - parts - last.bias * last.factors
    return float((rest - rest[:, :1]).abs().max() / written.abs().max().clamp_min(1e-30))


def _of_projections(trunk: CausalTrunk, kind: str, layer: int, x: Tensor) -> float:
    """Flip the sign of one part at the second position, a row for each part: only what reads it may move.

    A norm across heads, which couples them, does not notice a sign.
    """
    site, parts = Site(layer, "attn"), len(trunk.x0)
    rows = torch.arange(parts)

    def flip(value: Tensor) -> Tensor:
        value = value.clone()
        value[rows, 1, rows] *= -1
        return value

    stream = x.expand(parts, -1, -1).contiguous()
    _, before = _values(trunk, site, stream, "z")
    _, after = _values(trunk, site, stream, "z", change={kind: flip})
    moved = (after["z"] - before["z"]).abs().amax(-1)
    positions = torch.arange(_POSITIONS)
    reached = positions == 1 if kind == "q" else positions >= 1
    readers = torch.eye(parts, dtype=torch.bool).repeat_interleave(trunk.model.n_heads // parts, dim=1)
    allowed = (reached[:, None] & readers[:, None]).to(moved.device)
    # A key or a value is read by later positions too; a query that is taken for one would not be.
    if not moved[allowed].any() or (kind != "q" and not moved[:, -1].any()):
        return float("inf")
    return float(moved.masked_fill(allowed, 0.0).max() / before["z"].abs().max().clamp_min(1e-30))


def _of_pattern(trunk: CausalTrunk, layer: int, x: Tensor) -> float:
    _, found = _values(trunk, Site(layer, "attn"), x, "pattern", "v", "z")
    values = found["v"].repeat_interleave(trunk.model.n_heads // found["v"].shape[2], dim=2)
    mixed = torch.einsum("bhqk,bkhd->bqhd", found["pattern"].to(values.dtype), values)
    return relative_distance(mixed, found["z"])


def _values(
    trunk: CausalTrunk, site: Site, x: Float[Tensor, "batch pos d_model"], *kinds: str, change: Inside | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """What a branch writes, and the values inside it, while others may be changed."""
    found: dict[str, Tensor] = {}

    def keep(kind: str, value: Tensor) -> Tensor:
        return found.setdefault(kind, value)

    written = trunk.write(site, x, {**(change or {}), **{kind: partial(keep, kind) for kind in kinds}})
    return written, found


def _opened(model: CausalLM, ids: Tensor, rows: int) -> CausalTrunk:
    return model.trunk(Tokens(ids.expand(rows, -1).contiguous(), (ids.shape[1],) * rows, ()))
