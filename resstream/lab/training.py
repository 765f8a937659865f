"""Training a toy net on a task: full batches, the whole curve, and an early end where the loss runs away."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from resstream.errors import LabError
from resstream.lab.nets import Net
from resstream.lab.tasks import Task
from resstream.models.tokens import Tokens

# A loss that no honest net has: from here on a run has left for good, long before its numbers overflow.
RUNAWAY = 1e3


@dataclass(frozen=True)
class Training:
    """What came of a training run.

    >>> from resstream import lab
    >>> task = lab.rings(30)
    >>> lab.train(lab.mlp("residual", depth=2, ends=task.ends), task, steps=3).onset is None
    True

    Attributes:
        net: the net with the last weights that were finite.
        loss: mean cross-entropy before each step, in nats, up to the last step that was made.
        accuracy: share of right answers before each step.
        diverged: the step whose loss was no number any more, where the run ended; None if there was none.
    """

    net: Net
    loss: Float[np.ndarray, " step"]
    accuracy: Float[np.ndarray, " step"]
    diverged: int | None

    @property
    def onset(self) -> int | None:
        """The first step with a loss above 1000 nats, or without one; overflow comes much later than this."""
        gone = np.flatnonzero(~(self.loss <= RUNAWAY))
        return int(gone[0]) if gone.size else None

    def first(self, accuracy: float) -> int | None:
        """The first step at which so large a share of answers was right."""
        reached = np.flatnonzero(self.accuracy >= accuracy)
        return int(reached[0]) if reached.size else None


def train(
    net: Net,
    task: Task,
    *,
    steps: int = 500,
    rate: float = 3e-3,
    method: Literal["adam", "momentum"] = "adam",
    warmup: int = 0,
    seed: int = 0,
) -> Training:
    """Train a copy of a net by full batches on the cross-entropy of the answers.

    >>> from resstream import lab
    >>> task = lab.rings(30)
    >>> run = lab.train(lab.mlp("residual", depth=2, ends=task.ends), task, steps=100)
    >>> bool(run.loss[-1] < run.loss[0]), run.diverged, len(run.loss)
    (True, None, 101)

    Args:
        net: where to start; it stays as it is.
        task: what to learn, with the ends that the net was built with.
        steps: number of steps.
        rate: step size.
        method: Adam, or heavy-ball momentum: m <- 0.9 m + g.
        warmup: number of steps over which the step size rises from zero.
        seed: of the noise that some rules draw in training.
    Returns:
        A Training whose curves have one entry more than there were steps. A run whose loss is no number any more ends
        there, says at which step, and keeps its curve.
    Raises:
        LabError: a net that was built for another task, an unknown method, or numbers that make no training.
    """
    if method not in ("adam", "momentum"):
        raise LabError(f'no training method "{method}": there are "adam" and "momentum"')
    if steps < 1 or not rate > 0 or warmup < 0:
        raise LabError(
            f"steps={steps}, rate={rate}, warmup={warmup} train nothing; "
            "give steps from 1 on, a positive rate, and warmup=0 for none"
        )
    _require_ends_of(task, net)
    net = net.with_weights({name: value.detach().clone().requires_grad_() for name, value in net.weights.items()})
    weights = list(net.weights.values())
    optimiser: torch.optim.Optimizer = (
        torch.optim.Adam(weights, lr=rate) if method == "adam" else torch.optim.SGD(weights, lr=rate, momentum=0.9)
    )
    tokens, noise = net.tokenize(task.prompts), torch.Generator().manual_seed(seed)
    losses, accuracies = [], []
    for step in range(steps + 1):
        scores = scores_of(net, tokens, task, noise)
        loss = cross_entropy(scores, task.labels)
        losses.append(float(loss.detach()))
        accuracies.append(float((scores.argmax(-1) == task.labels).double().mean()))
        if not np.isfinite(losses[-1]):
            return _ended(net, losses, accuracies, step)
        if step == steps:
            break
        optimiser.zero_grad()
        loss.backward()
        # A step that is no number would overwrite the last weights that are.
        if not all(weight.grad is None or bool(weight.grad.isfinite().all()) for weight in weights):
            return _ended(net, losses, accuracies, step)
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / max(1, warmup))
        optimiser.step()
    return _ended(net, losses, accuracies, None)


def scores_of(
    net: Net, tokens: Tokens, task: Task, noise: torch.Generator | None = None
) -> Float[Tensor, "example class"]:
    """The logits of the answers after each prompt; gradients flow."""
    return net.readout(net.forward(tokens, noise)[:, -1], range(task.classes))


def _require_ends_of(task: Task, net: Net) -> None:
    """Refuse a net that would read something else in the task's prompts than the task means by them."""
    own, meant = net.design.ends, task.ends
    same = type(own) is type(meant) and own.vocab_size == meant.vocab_size
    if not same or not torch.equal(*(ends.embed(task.prompts, net.of("ends")) for ends in (own, meant))):
        raise LabError(
            f"{net.name} was built for other examples than those of {task.name} "
            f"({type(own).__name__} of {own.vocab_size} ids, and {type(meant).__name__} of {meant.vocab_size}); "
            "build it with the task's own ends, lab.mlp(..., ends=task.ends)"
        )


def _ended(net: Net, losses: list[float], accuracies: list[float], diverged: int | None) -> Training:
    weights = {name: value.detach() for name, value in net.weights.items()}
    return Training(net.with_weights(weights), np.array(losses), np.array(accuracies), diverged)
