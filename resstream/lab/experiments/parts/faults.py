"""Toy nets with exactly one fault each, by the name of the pitfall, and a sound one; misfits are not built at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from resstream.errors import LabError
from resstream.lab.branches import Attention, Perceptron
from resstream.lab.experiments.parts.at_start import random_words
from resstream.lab.nets import Net, mlp, transformer
from resstream.lab.tasks import rings
from resstream.lab.training import train

NO_FAULT = "none"
# The layer whose weights are replaced by noise, and how large the noise is, in its standard deviation.
POLLUTED, NOISE = 4, 1.0


@dataclass(frozen=True)
class Case:
    """A net, and what it reads.

    Attributes:
        net: the net.
        prompts: token ids.
    """

    net: Net
    prompts: Int[Tensor, "prompt pos"]


def trained(seed: int) -> Case:
    """A Pre-LN stack of ten layers, with a scaled start, that tells rings apart.

    >>> trained(0).net.n_layers
    10
    """
    task = rings(90, seed=seed)
    net = mlp("gpt2_scaling", depth=10, ends=task.ends, seed=seed)
    return Case(train(net, task, steps=150, rate=1e-2).net, task.answered)


def polluted(sound: Case, seed: int, layer: int = POLLUTED) -> Case:
    """The same with noise in the place of what one layer has learnt to write."""
    name = f"{layer}.mlp.out"
    rng, own = torch.Generator().manual_seed(seed), sound.net.weights[name]
    noise = NOISE * torch.randn(own.shape, generator=rng, dtype=own.dtype)
    return Case(sound.net.with_weights({**sound.net.weights, name: noise}), sound.prompts)


def _untrained(build: Callable[[int], Net]) -> Callable[[int], Case]:
    return lambda seed: Case(build(seed), random_words(4, 24, seed=seed).ids)


def _faded(seed: int) -> Net:
    """Each layer writes half as much as the one below."""
    net = transformer(layers=12, seed=seed)
    last = ("attn.o", "mlp.out")
    return net.with_weights(
        {
            name: value * 0.5 ** int(name.partition(".")[0]) if name.endswith(last) else value
            for name, value in net.weights.items()
        }
    )


def refused() -> str:
    """What is said to a branch that returns one number, which could be spread over the stream.

    >>> refused()[:39]
    'the "mlp" branches return 1 numbers, wh'
    """
    try:
        transformer(branch=Perceptron(out=1))
    except LabError as error:
        return str(error)
    return ""


FAULTS: Mapping[str, Callable[[int], Case]] = {
    NO_FAULT: _untrained(lambda seed: transformer(layers=12, seed=seed)),
    "large branches at init": _untrained(lambda seed: transformer("residual", layers=12, seed=seed)),
    "Post-LN without warm-up": _untrained(
        lambda seed: transformer("post_ln", layers=24, attention=Attention(causal=False), seed=seed)
    ),
    "rank collapse": _untrained(lambda seed: transformer("plain", layers=12, seed=seed)),
    "entropy collapse": _untrained(
        lambda seed: transformer(layers=12, attention=Attention(sharpness=100.0), seed=seed)
    ),
    "depth dilution": _untrained(_faded),
    "low-precision trunk": _untrained(lambda seed: transformer(layers=56, width=16, seed=seed, dtype=torch.bfloat16)),
    "activate-then-add": _untrained(lambda seed: transformer("trunk_activation", layers=12, seed=seed)),
    "a polluting layer": lambda seed: polluted(trained(seed), seed),
}
