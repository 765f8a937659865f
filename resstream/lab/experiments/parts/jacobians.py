"""The Jacobian of every block of a toy net at one point, and the gradient as a product or a sum over paths of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import combinations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from resstream.lab.nets import Net
from resstream.sites import Site

Matrix = Float[Tensor, "width width"]


def write_jacobians(net: Net, prompt: Int[Tensor, " pos"]) -> list[Matrix]:
    """The derivative of what each MLP writes at the state that it reads, of a prompt of one token.

    >>> from resstream import lab
    >>> linear = lab.mlp("residual", depth=2, width=4, branch=lab.Layer("none"))
    >>> found = write_jacobians(linear, torch.tensor([5]))
    >>> torch.allclose(found[1], linear.weights["1.mlp.out"].T)
    True
    """
    trunk, found = net.trunk(net.tokenize(prompt[None])), []
    with torch.no_grad():
        x = trunk.x0
        states = [x := trunk.layer(layer, x) if number else x for number, layer in enumerate([0, *trunk.order[:-1]])]
    for layer, state in zip(trunk.order, states, strict=True):
        write = partial(trunk.write, Site(layer, "mlp"))
        found.append(torch.autograd.functional.jacobian(lambda x, f=write: f(x[None, None])[0, 0], state[0, -1]))
    return found


def along_path(jacobians: Sequence[Matrix], path: Sequence[int], top: Float[Tensor, " width"]) -> Tensor:
    """What one path, which hops through some blocks and passes by the others, makes of the gradient at the top.

    >>> along_path([2 * torch.eye(1), 3 * torch.eye(1)], [0, 1], torch.ones(1))
    tensor([6.])
    """
    for block in reversed(path):
        top = top @ jacobians[block]
    return top


def paths_of(blocks: int) -> list[tuple[int, ...]]:
    """All paths through a stack of residual blocks, by the blocks that they hop through, the shorter ones first.

    >>> paths_of(2)
    [(), (0,), (1,), (0, 1)]
    """
    return [path for hops in range(blocks + 1) for path in combinations(range(blocks), hops)]


def through_all(jacobians: Sequence[Matrix], top: Float[Tensor, " width"]) -> Tensor:
    """The gradient below a stack of residual blocks: the product of all I + J, which is the sum over all paths.

    >>> through_all([2 * torch.eye(1), 3 * torch.eye(1)], torch.ones(1))
    tensor([12.])
    """
    for jacobian in reversed(jacobians):
        top = top + top @ jacobian
    return top
