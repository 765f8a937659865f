"""How much the first step of training changes what a net computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from resstream.lab.experiments.parts.at_start import Sample, mean_loss
from resstream.lab.nets import Net

Method: TypeAlias = Literal["SGD", "Adam"]
# What Adam adds to the size of a gradient before it divides by it.
_EPSILON = 1e-8


def matrices_of(net: Net) -> list[str]:
    """The names of the matrices of all branches: no biases, and nothing that belongs to a norm or to the ends.

    >>> from resstream import lab
    >>> matrices_of(lab.mlp("post_ln", depth=1))
    ['0.mlp.in', '0.mlp.out']
    """
    return [name for name, value in net.weights.items() if value.ndim == 2 and not name.startswith("ends.")]


def within_branches(net: Net) -> list[str]:
    """The names of all weights but those of the ends."""
    return [name for name in net.weights if not name.startswith("ends.")]


def first_update(net: Net, sample: Sample, names: Sequence[str], method: Method, rate: float) -> float:
    """Change some weights by one step down the mean loss, and return the root mean square change of all logits.

    >>> from resstream import lab
    >>> from resstream.lab.experiments.parts.at_start import random_words
    >>> net = lab.mlp("re_zero", depth=4)
    >>> first_update(net, random_words(4, 1), matrices_of(net), "SGD", rate=0.1)
    0.0

    Args:
        net: the net; it stays as it is.
        sample: what it reads and is to say.
        names: of the weights that are changed.
        method: plain gradient descent, or Adam, whose first step has the size `rate` in every weight.
        rate: step size.
    """
    followed = {name: net.weights[name].detach().clone().requires_grad_() for name in names}
    opened = net.with_weights({**net.weights, **followed})
    tokens = opened.tokenize(sample.ids)
    with torch.enable_grad():
        final = opened.forward(tokens)
        slopes = torch.autograd.grad(mean_loss(opened, final, sample), list(followed.values()))
    with torch.no_grad():
        moved = {
            name: net.weights[name] - rate * (slope if method == "SGD" else _scaled(slope))
            for name, slope in zip(names, slopes, strict=True)
        }
        changed = net.with_weights({**net.weights, **moved})
        return float((changed.readout(changed.forward(tokens)) - opened.readout(final)).square().mean().sqrt())


def _scaled(slope: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    return slope / (slope.abs() + _EPSILON)
