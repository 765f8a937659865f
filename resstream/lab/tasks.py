"""What toy nets are trained on: points of a plane in rings or spirals, and sequences to remember."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from resstream.errors import LabError
from resstream.lab.ends import Ends, Points


@dataclass(frozen=True)
class Task:
    """Examples with their answers.

    >>> from resstream import lab
    >>> lab.rings(6).answered[0]
    tensor([3, 0])

    Attributes:
        name: what it is called.
        ends: the embedding and unembedding that it needs.
        prompts: what a net reads, as token ids.
        labels: what it is to say after each, as a token id below `classes`.
        classes: number of answers.
    """

    name: str
    ends: Ends
    prompts: Int[Tensor, "example pos"]
    labels: Int[Tensor, " example"]
    classes: int

    @property
    def answered(self) -> Int[Tensor, "example pos_and_answer"]:
        """Prompts with their answers as one more token: what measures of the loss on text read."""
        return torch.cat([self.prompts, self.labels[:, None]], dim=1)


def rings(count: int = 150, *, noise: float = 0.08, scale: float = 1.0, head_std: float = 1.0, seed: int = 0) -> Task:
    """Points of three rings of radius 1, 2 and 3 around the origin, to be told apart.

    >>> from resstream import lab
    >>> task = lab.rings(6)
    >>> task.prompts.T, task.labels
    (tensor([[3, 4, 5, 6, 7, 8]]), tensor([0, 0, 1, 1, 2, 2]))

    Args:
        count: number of points, the same in each ring.
        noise: standard deviation of the radius.
        scale: a factor on all points.
        head_std: of the readout's weights, in units of 1 / sqrt(width).
        seed: of the points.
    Raises:
        LabError: a count that three rings cannot share.
    """
    rng, labels = _labels(count, seed)
    angle = 2 * math.pi * torch.rand(count, generator=rng, dtype=torch.float64)
    radius = 1 + labels + noise * torch.randn(count, generator=rng, dtype=torch.float64)
    return _points("rings", scale * _polar(radius, angle), labels, head_std)


def spirals(
    count: int = 300,
    *,
    turns: float = 0.7,
    noise: float = 0.1,
    scale: float = 1.0,
    head_std: float = 1.0,
    seed: int = 0,
) -> Task:
    """Points of three spiral arms from radius 0.1 to 1, to be told apart.

    >>> from resstream import lab
    >>> lab.spirals(9).labels
    tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])

    Args:
        count: number of points, the same in each arm.
        turns: how often an arm winds around the origin; 0.7 is hard for a linear classifier, which scores 0.53.
        noise: standard deviation of the angle, in radians.
        scale: a factor on all points.
        head_std: of the readout's weights, in units of 1 / sqrt(width).
        seed: of the points.
    Raises:
        LabError: a count that three arms cannot share.
    """
    rng, labels = _labels(count, seed)
    radius = torch.linspace(0.1, 1.0, count // 3, dtype=torch.float64).repeat(3)
    wobble = noise * torch.randn(count, generator=rng, dtype=torch.float64)
    angle = 2 * math.pi * turns * radius + 2 * math.pi * labels / 3 + wobble
    return _points("spirals", scale * _polar(radius, angle), labels, head_std)


def _labels(count: int, seed: int) -> tuple[torch.Generator, Int[Tensor, " point"]]:
    if isinstance(count, bool) or count < 3 or count % 3:
        raise LabError(f"count={count} cannot be shared by three classes; give a multiple of 3, such as count=300")
    return torch.Generator().manual_seed(seed), torch.arange(3).repeat_interleave(count // 3)


def _polar(radius: Tensor, angle: Tensor) -> Float[Tensor, "point 2"]:
    return radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)


def _points(name: str, points: Float[Tensor, "point 2"], labels: Int[Tensor, " point"], head_std: float) -> Task:
    ends = Points(points, classes=3, head_std=head_std)
    return Task(name, ends, 3 + torch.arange(len(points))[:, None], labels, 3)
