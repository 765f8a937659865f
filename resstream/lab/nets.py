"""Toy nets: a stack of branches joined by a residual rule, as a model that every measure takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from resstream.check import Check
from resstream.errors import LabError, listed
from resstream.lab.branches import Attention, Branch, Perceptron
from resstream.lab.design import Design
from resstream.lab.ends import Ends, Words
from resstream.lab.opened import NetTrunk, batch_of
from resstream.lab.proof import prove_inside
from resstream.lab.require import whole
from resstream.lab.rules import Rule, rule_of
from resstream.lab.rules.base import Weights, layer_norm
from resstream.models.carry import Carry
from resstream.models.frozen import frozen
from resstream.models.left_context import LeftContext
from resstream.models.tokens import Tokens
from resstream.models.trunk import TOLERANCE, ResidualModel, relative_distance, worst_of
from resstream.sites import Site


class Net(ResidualModel):
    """A toy net: a design and its weights, neither of which ever changes.

    A stack of MLPs counts as parallel: its layers are one step each, and it has no attention.

    >>> from resstream import lab
    >>> net = lab.mlp("residual", depth=2)
    >>> doubled = net.with_weights({**net.weights, "ends.unembed": 2 * net.weights["ends.unembed"]})
    >>> ids = torch.tensor([[5, 7]])
    >>> bool((doubled.logits(ids) == 2 * net.logits(ids)).all())
    True

    Attributes:
        design: what the net is made of.
        weights: what it has learnt, by name: "ends.embed", "3.mlp.out".
    """

    tokenizer: Any = None
    hf_model: Any = None

    def __init__(self, design: Design, weights: Weights, name: str | None = None):
        self.design, self.weights = design, weights
        self.name = name or f"{design.rule}, {design.layers} layers"
        self.n_layers, self.d_model = design.layers, design.width
        attention = design.branches.get("attn")
        self.n_heads = attention.heads if isinstance(attention, Attention) else 0
        self.vocab_size, self.max_positions = design.ends.vocab_size, design.ends.max_positions
        self.layout = "sequential" if "attn" in design.branches else "parallel"

    @cached_property
    def check(self) -> Check:  # type: ignore[override]
        """The certificate, measured when it is first asked for."""
        return self.verify()

    @cached_property
    def steps(self) -> tuple[tuple[Site, ...], ...]:
        """One step for each branch."""
        return tuple((site,) for site in self.design.sites)

    @property
    def parts(self) -> Mapping[str, int]:
        """Heads and neurons."""
        found: dict[str, int] = {}
        for branch in self.design.branches.values():
            found |= branch.parts(self.d_model)
        return found

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights["ends.embed"].device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return self.weights["ends.embed"].dtype

    def of(self, place: str | Site) -> Weights:
        """The weights of one step, or of the "ends"."""
        return self._by_place[str(place)]

    @cached_property
    def _by_place(self) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = {"ends": {}, **{str(site): {} for site in self.design.sites}}
        for name, value in self.weights.items():
            place = "ends" if name.startswith("ends.") else ".".join(name.split(".")[:2])
            found[place][name.removeprefix(f"{place}.")] = value
        return found

    def with_weights(self, weights: Weights) -> Net:
        """The same design with other weights.

        Raises:
            LabError: weights whose names or shapes are not those of this net.
        """
        odd = sorted(
            name for name in {**self.weights, **weights} if _shape(weights, name) != _shape(self.weights, name)
        )
        if odd:
            raise LabError(
                f"weights of {self.name}: {odd[0]} has shape {_shape(weights, odd[0])}, where this net has "
                f"{_shape(self.weights, odd[0])} ({len(odd)} of {len(self.weights)} differ); "
                "give all that are in net.weights, in their shapes"
            )
        return Net(self.design, weights, self.name)

    def trunk(self, tokens: Tokens, *, left: LeftContext | None = None, keep: bool = False) -> NetTrunk:
        """Open the stream."""
        if keep or (left is not None and left.until):
            self.require_left()
        return NetTrunk.of(self, tokens)

    def readout(
        self, x: Float[Tensor, "*batch d_model"], vocab: Sequence[int] | None = None
    ) -> Float[Tensor, "*batch vocab"]:
        """The last norm, if the rule has one, and the unembedding."""
        weights = self.of("ends")
        return self.design.ends.logits(layer_norm(x, weights) if self.design.rule.normed else x, weights, vocab)

    def carry(self, step: tuple[Site, ...]) -> Carry:
        """What the rule does to the stream itself."""
        return self.design.rule.carry(self.of(step[0]), self.design.place(step[0]))

    def forward(self, tokens: Tokens, noise: torch.Generator | None = None) -> Float[Tensor, "batch pos d_model"]:
        """The last state of the stream, straight through; with `noise`, as in training."""
        return NetTrunk.of(self, tokens, noise).run()

    def own_logits(self, tokens: Tokens) -> Float[Tensor, "prompt pos vocab"]:
        """The logits, by running the rule's formula straight through."""
        rule, x = self.design.rule, self.design.ends.embed(tokens.ids, self.of("ends"))
        batch = batch_of(self, tokens, None)
        for site in self.design.sites:
            place = self.design.place(site)
            weights = rule.prepare(self.of(site), place, batch)
            y = self.design.branches[site.kind].apply(rule.read(x, weights), weights, tokens.mask, {})
            carry = rule.carry(weights, place)
            passing = x if carry.before is None else carry.before(x)
            total = passing + rule.write(y, x, weights)
            x = total if carry.after is None else carry.after(total)
        return self.readout(x)

    def verify(self) -> Check:
        """Hold the opened trunk, layer by layer and step by step, against the formula on a few random tokens."""
        rng = torch.Generator().manual_seed(0)
        ids = torch.randint(self.vocab_size, (2, min(3, self.max_positions or 3)), generator=rng).to(self.device)
        tokens = self.tokenize(ids)
        with torch.no_grad():
            own, trunk = self.own_logits(tokens), self.trunk(tokens)
            x = trunk.x0
            for step in self.steps:
                x = self.carry(step).add(x, trunk.write(step[0], x))
            errors = {
                "layers": relative_distance(self.readout(trunk.run()), own),
                "steps": relative_distance(self.readout(x), own),
            }
        where = worst_of(errors)
        return Check("opened trunk = the rule's formula", errors[where], TOLERANCE[self.dtype], where=where)

    def in_float64(self) -> Net:
        """The same net with its weights in float64."""
        return self.in_dtype(torch.float64)

    def in_dtype(self, dtype: torch.dtype) -> Net:
        """The same net with its weights in another type."""
        return self.with_weights({name: value.detach().to(dtype) for name, value in self.weights.items()})

    def frozen(self, part: Literal["attn", "mlp", "readout", "trunk"]) -> AbstractContextManager[None]:
        """Hold scales of norms, attention patterns and gates fixed; an activation counts as a factor."""
        return frozen("slope")

    @cached_property
    def checks_inside(self) -> Mapping[str, Check]:
        """That the values inside the branches are where they are said to be, on a few random tokens."""
        return prove_inside(self)


def mlp(
    rule: str | Rule = "residual",
    *,
    depth: int = 8,
    width: int = 32,
    branch: Branch | None = None,
    ends: Ends | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Net:
    """A stack of MLPs joined by a residual rule, before training.

    >>> from resstream import lab
    >>> net = lab.mlp("residual", depth=6, width=16)
    >>> net.writes[:2], net.logits(torch.tensor([[5, 7]])).shape
    (('0.mlp', '1.mlp'), torch.Size([1, 2, 100]))

    Args:
        rule: a rule, or its name.
        depth: number of layers, one branch each.
        width: how many numbers the stream has.
        branch: what each layer computes; by default a perceptron with as many tanh neurons as the stream is wide.
        ends: embedding and unembedding; by default a vocabulary of 100 random vectors.
        seed: of the weights.
        dtype: type of the weights, which are drawn in float64.
    Raises:
        LabError: an unknown rule, or sizes that make no net.
    """
    whole("depth", depth)
    return _net(rule, {"mlp": branch or Perceptron()}, depth, width, ends or Words(), seed, dtype)


def transformer(
    rule: str | Rule = "pre_ln",
    *,
    layers: int = 4,
    width: int = 64,
    attention: Attention | None = None,
    branch: Branch | None = None,
    ends: Ends | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Net:
    """A stack of attention and MLP branches joined by a residual rule, before training.

    >>> from resstream import lab
    >>> net = lab.transformer("pre_ln", layers=2, width=16)
    >>> net.writes, net.n_heads, net.parts["neuron"]
    (('0.attn', '0.mlp', '1.attn', '1.mlp'), 4, 64)

    Args:
        rule: a rule, or its name.
        layers: number of layers, two branches each.
        width: how many numbers the stream has.
        attention: the attention branches; by default four causal heads.
        branch: the other branches; by default a perceptron with four times as many ReLU neurons as the stream is wide,
            W2 at standard deviation sqrt(2).
        ends: embedding and unembedding; by default a vocabulary of 100 random vectors.
        seed: of the weights.
        dtype: type of the weights, which are drawn in float64.
    Raises:
        LabError: an unknown rule, or sizes that make no net.
    """
    branches = {"attn": attention or Attention(), "mlp": branch or Perceptron(4 * width, "relu", (1.0, 2**0.5))}
    return _net(rule, branches, layers, width, ends or Words(), seed, dtype)


def _net(
    rule: str | Rule,
    branches: Mapping[str, Branch],
    layers: int,
    width: int,
    ends: Ends,
    seed: int,
    dtype: torch.dtype,
) -> Net:
    if dtype not in TOLERANCE:
        raise LabError(f"no net computes in dtype={dtype}; give one of {listed(TOLERANCE)}")
    design = Design(rule_of(rule), branches, layers, width, ends)
    return Net(design, design.start(seed, dtype))


def _shape(weights: Weights, name: str) -> tuple[int, ...] | None:
    return tuple(weights[name].shape) if name in weights else None
