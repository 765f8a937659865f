"""Subsets: what a value for each set of units says of every unit, of every pair, and of sets of every size.

A value for every subset of n units is an array whose last axis has 2^n entries: bit i of an entry's number says whether
unit i is in the set, so entry 0 is the empty set and the last one is all of them.
"""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
from jaxtyping import Bool, Float, Int

from resstream.measure.intervals import student


def members(units: int) -> Bool[np.ndarray, "subset unit"]:
    """Which units are in each of the 2^n subsets.

    >>> members(2).astype(int).tolist()
    [[0, 0], [1, 0], [0, 1], [1, 1]]
    """
    return (np.arange(2**units)[:, None] >> np.arange(units) & 1).astype(bool)


def members_up_to(units: int, order: int) -> Bool[np.ndarray, "subset unit"]:
    """Which units are in each subset of no more than so many units, the smaller subsets first.

    >>> members_up_to(3, 1).astype(int).tolist()
    [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]
    """
    chosen = [subset for size in range(order + 1) for subset in combinations(range(units), size)]
    kept = np.zeros((len(chosen), units), dtype=bool)
    for row, subset in enumerate(chosen):
        kept[row, list(subset)] = True
    return kept


def sizes(units: int) -> Int[np.ndarray, " subset"]:
    """How many units each subset has.

    >>> sizes(3).tolist()
    [0, 1, 1, 2, 1, 2, 2, 3]
    """
    return members(units).sum(axis=1)


def moebius(values: Float[np.ndarray, "*batch subset"]) -> Float[np.ndarray, "*batch subset"]:
    """What each subset adds that none of its own subsets has: m(S) = sum over T in S of (-1)^(|S| - |T|) f(T).

    Values are sums of these terms: f(S) is the sum of m(T) over all T in S.

    >>> moebius(np.array([1.0, 3.0, 4.0, 10.0])).tolist()
    [1.0, 2.0, 3.0, 4.0]
    """
    terms = np.array(values, dtype=float)
    for unit in range(_units(values)):
        _split(terms, unit)[..., 1, :] -= _split(terms, unit)[..., 0, :]
    return terms


def shapley(values: Float[np.ndarray, "*batch subset"]) -> Float[np.ndarray, "*batch unit"]:
    """What each unit adds to a set of others, averaged over all sets of a size and then over all sizes.

    >>> shapley(np.array([1.0, 3.0, 4.0, 10.0])).tolist()
    [4.0, 5.0]

    Returns:
        One value a unit; they sum to f(all) - f(none).
    """
    return np.stack([_mean_over_sizes(_gain(values, unit)) for unit in range(_units(values))], axis=-1)


def interactions(values: Float[np.ndarray, "*batch subset"]) -> Float[np.ndarray, "*batch unit unit_2"]:
    """How much more two units add together than apart, averaged over sets of others as in Shapley values.

    >>> interactions(np.array([1.0, 3.0, 4.0, 10.0])).tolist()
    [[nan, 4.0], [4.0, nan]]

    Returns:
        A symmetric matrix; a unit has no interaction with itself.
    """
    units = _units(values)
    matrix = np.full((*values.shape[:-1], units, units), np.nan)
    for low, high in combinations(range(units), 2):
        # The higher bit goes first, so that the lower one is still at its place.
        matrix[..., low, high] = matrix[..., high, low] = _mean_over_sizes(_gain(_gain(values, high), low))
    return matrix


def level_means(values: Float[np.ndarray, "*batch subset"]) -> Float[np.ndarray, "*batch order"]:
    """The mean over all subsets of each size.

    >>> level_means(np.array([1.0, 3.0, 4.0, 10.0])).tolist()
    [1.0, 3.5, 10.0]
    """
    return _level_means(values, sizes(_units(values)))


def order_totals(means: Float[np.ndarray, "*batch order"], units: int) -> Float[np.ndarray, "*batch order"]:
    """The sum of the Moebius terms of each order, out of the means of each level up to there.

    The total of order k is C(n, k) times the k-th difference of the level means at 0. That is why a small error of a
    mean is a large one of a total: it is multiplied by up to C(n, k) C(k, k/2).

    >>> order_totals(np.array([1.0, 3.5, 10.0]), units=2).tolist()
    [1.0, 5.0, 4.0]

    Args:
        means: f averaged over all subsets of 0, 1, 2 ... units, as far as it is known.
        units: how many units there are.
    """
    differences = [np.diff(means, n=order, axis=-1)[..., 0] for order in range(means.shape[-1])]
    return np.stack([comb(units, order) * each for order, each in enumerate(differences)], axis=-1)


def chains(orders: Int[np.ndarray, "*batch unit"]) -> Bool[np.ndarray, "*batch step unit"]:
    """The nested subsets that units make up as they join in some order, from none to all.

    >>> chains(np.array([1, 0])).astype(int).tolist()
    [[0, 0], [0, 1], [1, 1]]
    """
    turns = np.argsort(orders, axis=-1)
    return turns[..., None, :] < np.arange(orders.shape[-1] + 1)[:, None]


def gains_by_unit(
    values: Float[np.ndarray, "*batch step"], orders: Int[np.ndarray, "*batch unit"]
) -> Float[np.ndarray, "*batch unit"]:
    """What each unit added when it joined; along one order these sum to f(all) - f(none).

    >>> gains_by_unit(np.array([1.0, 4.0, 10.0]), np.array([1, 0])).tolist()
    [6.0, 3.0]
    """
    return np.take_along_axis(np.diff(values, axis=-1), np.argsort(orders, axis=-1), axis=-1)


def mean_with_interval(draws: Float[np.ndarray, draw * rest]) -> tuple[np.ndarray, np.ndarray]:
    """The mean of independent draws, and half the width of its 95% interval, which fewer than three do not give.

    >>> mean, half = mean_with_interval(np.array([1.0, 2.0, 3.0, 6.0]))
    >>> float(mean), round(float(half), 1)
    (3.0, 3.4)
    """
    count, mean = len(draws), np.asarray(draws.mean(axis=0))
    if count < 3:
        return mean, np.full(mean.shape, np.nan)
    return mean, np.asarray(student(count - 1) * draws.std(axis=0, ddof=1) / np.sqrt(count))


def _units(values: np.ndarray) -> int:
    return int(values.shape[-1]).bit_length() - 1


def _split(values: np.ndarray, unit: int) -> np.ndarray:
    """The last axis as three, of which the middle one says whether a unit is in the subset; a view."""
    return values.reshape(*values.shape[:-1], -1, 2, 2**unit)


def _gain(values: np.ndarray, unit: int) -> np.ndarray:
    """What a unit adds to each subset of the others, numbered as subsets of one unit fewer."""
    split = _split(values, unit)
    return (split[..., 1, :] - split[..., 0, :]).reshape(*values.shape[:-1], -1)


def _mean_over_sizes(values: np.ndarray) -> np.ndarray:
    """The mean over sizes of the mean over all subsets of each size."""
    return np.asarray(_level_means(values, sizes(_units(values))).mean(axis=-1))


def _level_means(values: np.ndarray, size: np.ndarray) -> np.ndarray:
    levels = [values[..., size == level].mean(axis=-1) for level in range(int(size.max()) + 1)]
    return np.stack(levels, axis=-1)
