"""The gradient of a net's loss along its trunk, and its proof by finite differences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from resstream.check import Check
from resstream.lab.nets import Net
from resstream.lab.tasks import Task
from resstream.models.trunk import worst_of

_STEP = 1e-5


def gradients_by_boundary(net: Net, task: Task) -> list[Float[Tensor, "example pos width"]]:
    """The gradient of the mean cross-entropy at each boundary of a net, from its input to its last state."""
    with torch.enable_grad():
        states, loss = _run(net, task)
        return list(torch.autograd.grad(loss, states))


def check_slope(nets: Sequence[Net], task: Task, tolerance: float = 1e-5) -> Check:
    """Hold the gradient at each net's input against central differences along it; the error is relative."""
    errors = {net.name: _slope_error(net, task) for net in nets}
    worst = worst_of(errors)
    return Check("gradient at the input = central differences", errors[worst], tolerance, where=worst)


def _slope_error(net: Net, task: Task) -> float:
    gradient = gradients_by_boundary(net, task)[0]
    slope = float(gradient.norm())
    direction = gradient / gradient.norm()
    # Where the gradient is large, as it is in some nets by orders, a smaller step changes the loss by as little.
    step = _STEP / max(slope, 1.0)
    with torch.no_grad():
        up, down = (float(_run(net, task, shift=sign * step * direction)[1]) for sign in (1, -1))
    return abs((up - down) / (2 * step) - slope) / slope


def _run(net: Net, task: Task, shift: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
    """The stream at each boundary, and the loss that it leads to."""
    trunk = net.trunk(net.tokenize(task.prompts))
    x = trunk.x0.detach() if shift is None else trunk.x0.detach() + shift
    states = [x.requires_grad_(shift is None)]
    for layer in trunk.order:
        states.append(trunk.layer(layer, states[-1]))
    return states, cross_entropy(net.readout(states[-1][:, -1], range(task.classes)), task.labels)
