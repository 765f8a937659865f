"""Toy nets for tests: every rule with its options, and weights as after some training."""

from __future__ import annotations

import torch

from resstream import lab

CASES: dict[str, lab.Rule] = {
    **{name: kind() for name, kind in lab.RULES.items()},
    "trunk_activation, relu": lab.TrunkActivation("relu"),
    "skip_init, by depth": lab.SkipInit("depth"),
    "switchable, all": lab.Switchable("post", rezero=True, projection=True),
    "switchable, none": lab.Switchable("none"),
}


def worn(net: lab.Net, by: float = 0.3, seed: int = 1) -> lab.Net:
    """The net with every weight moved at random, so that nothing is at its start any more, where much is zero."""
    rng = torch.Generator().manual_seed(seed)
    moved = {
        name: value + by * torch.randn(value.shape, generator=rng, dtype=torch.float64).to(value)
        for name, value in net.weights.items()
    }
    return net.with_weights(moved)


def small_mlp(rule: lab.Rule | str, **options) -> lab.Net:
    """Three layers of MLPs on a stream of four numbers."""
    return lab.mlp(rule, **{"depth": 3, "width": 4, "ends": lab.Words(vocab=6), **options})


def small_transformer(rule: lab.Rule | str, **options) -> lab.Net:
    """Three layers of attention and MLPs on a stream of eight numbers."""
    settings = {"layers": 3, "width": 8, "attention": lab.Attention(heads=2), "ends": lab.Words(vocab=6)}
    return lab.transformer(rule, **{**settings, "branch": lab.Perceptron(5, "tanh"), **options})
