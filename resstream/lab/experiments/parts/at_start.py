"""A stack before training, on random words: its variance and gradient at each boundary, and its weights' gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from resstream.errors import LabError
from resstream.lab.nets import Net
from resstream.lab.require import whole
from resstream.lab.tasks import Task


@dataclass(frozen=True)
class Sample:
    """Random words, each with a random word to say next.

    Attributes:
        ids: the words.
        labels: what is to be said after each.
    """

    ids: Int[Tensor, "prompt pos"]
    labels: Int[Tensor, "prompt pos"]

    def task(self, net: Net) -> Task:
        """The last word of each prompt alone, as a task for a net."""
        return Task("random words", net.design.ends, self.ids, self.labels[:, -1], net.vocab_size)


def random_words(prompts: int, length: int, *, vocab: int = 100, seed: int = 0) -> Sample:
    """Draw words and labels.

    >>> random_words(2, 5).ids.shape
    torch.Size([2, 5])
    """
    rng = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(vocab, (prompts, length), generator=rng) for _ in range(2))
    return Sample(ids, labels)


@dataclass(frozen=True)
class Start:
    """What a stack does before training.

    Attributes:
        variance: of all numbers of the stream, at each boundary.
        gradient: norm of the score's gradient, at each boundary.
        weights: norm of the score's gradient with respect to each weight that was asked for.
    """

    variance: Float[np.ndarray, " boundary"]
    gradient: Float[np.ndarray, " boundary"]
    weights: Mapping[str, float]

    @property
    def in_over_out(self) -> float:
        """The gradient at the input over that at the last state."""
        return float(self.gradient[0] / self.gradient[-1])


def require_depths(depths: Sequence[int]) -> list[int]:
    """The depths of an experiment, each once, from the least on.

    >>> require_depths((24, 6))
    [6, 24]

    Raises:
        LabError: none, or one that makes no net.
    """
    if not depths:
        raise LabError("depths=() builds no net; give some, such as depths=(6, 24)")
    for depth in depths:
        whole("depth", depth)
    return sorted(set(depths))


def mean_loss(net: Net, final: Float[Tensor, "prompt pos width"], sample: Sample) -> Float[Tensor, ""]:
    """The mean cross-entropy of all labels."""
    return cross_entropy(net.readout(final).flatten(0, 1), sample.labels.flatten())


def one_direction(net: Net, final: Float[Tensor, "prompt pos width"], sample: Sample) -> Float[Tensor, ""]:
    """The last state along a random direction: a gradient that is there also where the readout starts at zero."""
    rng = torch.Generator().manual_seed(0)
    return (torch.randn(final.shape, generator=rng, dtype=final.dtype) * final).sum()


def at_start(
    net: Net,
    sample: Sample,
    weights: Sequence[str] = (),
    score: Callable[[Net, Tensor, Sample], Tensor] = mean_loss,
) -> Start:
    """Run a net forward and backward once.

    >>> from resstream import lab
    >>> at_start(lab.mlp("residual", depth=3), random_words(4, 1)).gradient.shape
    (4,)

    Args:
        net: the net.
        sample: what it reads and is to say.
        weights: names of the weights whose gradients are wanted.
        score: whose gradient it is, a function of the net, its last state and the sample.
    """
    followed = {name: net.weights[name].detach().clone().requires_grad_() for name in weights}
    opened = net.with_weights({**net.weights, **followed})
    with torch.enable_grad():
        trunk = opened.trunk(opened.tokenize(sample.ids))
        states = [trunk.x0.requires_grad_()]
        for layer in trunk.order:
            states.append(trunk.layer(layer, states[-1]))
        slopes = torch.autograd.grad(score(opened, states[-1], sample), [*states, *followed.values()])
    norms = [float(slope.norm()) for slope in slopes]
    variance = [float(state.detach().var(unbiased=False)) for state in states]
    return Start(
        np.array(variance),
        np.array(norms[: len(states)]),
        dict(zip(followed, norms[len(states) :], strict=True)),
    )
