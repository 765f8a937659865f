"""Paths by length: how many there are, which lengths carry most, and single ones drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

import numpy as np
from jaxtyping import Float, Int

COVERAGE = 0.95


def count_paths(widths: Sequence[int]) -> list[int]:
    """How many paths there are of each length, exactly: the coefficients of the product of (1 + w z).

    >>> count_paths([1, 1, 1]), count_paths([2, 2])
    ([1, 3, 3, 1], [1, 4, 4])

    Args:
        widths: in how many ways a path can hop at each step.
    """
    counts = [1]
    for width in widths:
        counts = [stay + width * hop for stay, hop in zip([*counts, 0], [0, *counts], strict=True)]
    return counts


def effective_range(
    weights: Sequence[float] | Float[np.ndarray, " length"], coverage: float = COVERAGE
) -> tuple[int, int]:
    """The shortest run of lengths that holds a share of all weight; the heavier one if two are as short.

    >>> effective_range([0.01, 0.5, 0.48, 0.01])
    (1, 2)
    """
    total = np.concatenate([[0.0], np.cumsum(weights)])
    goal = coverage * total[-1]
    for width in range(1, len(weights) + 1):
        held = total[width:] - total[:-width]
        if held.max() >= goal:
            low = int(held.argmax())
            return low, low + width - 1
    return 0, len(weights) - 1


def share_of_paths(counts: Sequence[int], low: int, high: int) -> float:
    """The share of all paths whose length lies in a range, both ends included.

    >>> round(100 * share_of_paths(count_paths([1] * 54), 5, 17), 4)
    0.4537

    Source:
        Veit, Wilber, Belongie 2016, section 4.3: the 5 to 17 of 54 modules that carry ResNet-110's gradient.
    """
    return sum(counts[low : high + 1]) / sum(counts)


def draw_paths(widths: Sequence[int], samples: int, rng: np.random.Generator) -> Int[np.ndarray, "path step"]:
    """Paths of every length, uniform among those of that length; all of them where there are no more than `samples`.

    One random order of the steps gives one path of each length: its first k steps. So for each length the paths are
    independent draws, while between lengths they share their beginnings, and most of the work.

    Args:
        widths: in how many ways a path can hop at each step, the same at all.
        samples: how many paths of each length.
        rng: where the draws come from.
    Returns:
        For each path and step the hop that it takes, or -1 where it passes by.
    """
    steps, counts = len(widths), count_paths(widths)
    few = {length for length, count in enumerate(counts) if count <= samples}
    chosen = [
        _path(steps, np.array(taken, dtype=int), np.array(hops, dtype=int))
        for length in sorted(few)
        for taken in combinations(range(steps), length)
        for hops in product(*(range(widths[step]) for step in taken))
    ]
    for _ in range(samples):
        order, hops = rng.permutation(steps), rng.integers(widths)
        firsts = (order[:length] for length in range(len(counts)) if length not in few)
        chosen += [_path(steps, taken, hops[taken]) for taken in firsts]
    return np.array(chosen)


def _path(steps: int, taken: np.ndarray, hops: np.ndarray) -> Int[np.ndarray, " step"]:
    path = np.full(steps, -1)
    path[taken] = hops
    return path
