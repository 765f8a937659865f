"""The combinatorics of subsets against their definitions, spelled out set by set and order by order."""

from __future__ import annotations

from itertools import combinations, permutations
from math import comb, factorial

import numpy as np
import pytest
from scipy import stats

from resstream.measure.removals import subsets

EXACT = 1e-12
COUNTS = [1, 2, 3, 5]


def some_values(units, prompts=2):
    return np.random.default_rng(units).normal(size=(prompts, 2**units))


def sets(units, within=None):
    """All subsets as tuples, of these units or of the first so many."""
    within = range(units) if within is None else within
    return [chosen for size in range(len(within) + 1) for chosen in combinations(within, size)]


def number(chosen):
    return sum(2**unit for unit in chosen)


def others(units, *without):
    return sets(units, [unit for unit in range(units) if unit not in without])


def moebius_by_definition(values, units):
    terms = np.zeros_like(values)
    for chosen in sets(units):
        for part in sets(units, chosen):
            terms[:, number(chosen)] += (-1) ** (len(chosen) - len(part)) * values[:, number(part)]
    return terms


def shapley_by_definition(values, units):
    """The mean over all orders of what each unit adds when it joins."""
    total = np.zeros((len(values), units))
    for order in permutations(range(units)):
        for place, unit in enumerate(order):
            total[:, unit] += values[:, number(order[: place + 1])] - values[:, number(order[:place])]
    return total / factorial(units)


def interactions_by_definition(values, units):
    """Grabisch and Roubens 1999: second differences, weighted by (n - t - 2)! t! / (n - 1)!."""
    matrix = np.full((len(values), units, units), np.nan)
    for i, j in permutations(range(units), 2):
        matrix[:, i, j] = 0
        for rest in others(units, i, j):
            weight = factorial(units - len(rest) - 2) * factorial(len(rest)) / factorial(units - 1)
            both, one, two, none = (values[:, number((*rest, *more))] for more in ((i, j), (i,), (j,), ()))
            matrix[:, i, j] += weight * (both - one - two + none)
    return matrix


def level_means_by_definition(values, units):
    chosen = [[number(each) for each in combinations(range(units), size)] for size in range(units + 1)]
    return np.stack([values[:, each].mean(axis=1) for each in chosen], axis=1)


DEFINITIONS = {
    "moebius": moebius_by_definition,
    "shapley": shapley_by_definition,
    "interactions": interactions_by_definition,
    "level_means": level_means_by_definition,
}


def is_its_definition(name, function, units):
    values = some_values(units)
    expected = DEFINITIONS[name](values, units)
    np.testing.assert_allclose(function(values), expected, atol=EXACT, rtol=0)
    np.testing.assert_allclose(function(values[0]), expected[0], atol=EXACT, rtol=0)


@pytest.mark.parametrize("units", COUNTS)
@pytest.mark.parametrize("name", DEFINITIONS)
def test_each_is_its_definition(name, units):
    is_its_definition(name, getattr(subsets, name), units)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_planted_error_is_noticed(name):
    """The twin of the test above: one value in eight is off by a thousandth."""
    honest = getattr(subsets, name)
    with pytest.raises(AssertionError):
        is_its_definition(name, lambda values: honest(values + 1e-3 * (np.arange(values.shape[-1]) == 3)), 3)


@pytest.mark.parametrize("units", COUNTS)
def test_terms_sum_to_their_values_and_shapley_values_to_the_whole(units):
    values = some_values(units)
    kept = values.copy()
    terms = subsets.moebius(values)
    for chosen in sets(units):
        parts = [number(part) for part in sets(units, chosen)]
        np.testing.assert_allclose(terms[:, parts].sum(axis=1), values[:, number(chosen)], atol=EXACT)
    np.testing.assert_allclose(subsets.shapley(values).sum(axis=1), values[:, -1] - values[:, 0], atol=EXACT)
    assert np.array_equal(values, kept), "and the values are left alone"


@pytest.mark.parametrize("units", COUNTS)
def test_order_totals_are_sums_of_terms(units):
    values = some_values(units)
    terms, size = subsets.moebius(values), subsets.sizes(units)
    expected = np.stack([terms[:, size == order].sum(axis=1) for order in range(units + 1)], axis=1)
    means = subsets.level_means(values)
    np.testing.assert_allclose(subsets.order_totals(means, units), expected, atol=1e-11)
    np.testing.assert_allclose(subsets.order_totals(means[:, :2], units), expected[:, :2], atol=EXACT)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(subsets.order_totals(means, units + 1), expected, atol=1e-11)


def test_the_noise_of_an_order_total_grows_as_the_error_says():
    """An error of one level mean is multiplied by C(n, k) C(k, t) in the total of order k."""
    for level in range(5):
        off = subsets.order_totals((np.arange(5) == level).astype(float), 12)
        assert np.abs(off).tolist() == [comb(12, order) * comb(order, level) for order in range(5)]


def test_members_are_bits():
    for units in COUNTS:
        kept = subsets.members(units)
        assert (kept @ 2 ** np.arange(units) == np.arange(2**units)).all()
        assert (subsets.sizes(units) == kept.sum(axis=1)).all()
    assert subsets.members_up_to(4, 2).sum(axis=1).tolist() == [0] + [1] * 4 + [2] * 6
    assert len(np.unique(subsets.members_up_to(5, 5), axis=0)) == 32


def test_chains_add_one_unit_at_a_time():
    orders = np.stack([np.random.default_rng(seed).permutation(6) for seed in range(4)]).reshape(2, 2, 6)
    steps = subsets.chains(orders)
    assert steps.shape == (2, 2, 7, 6)
    assert (steps.sum(axis=-1) == np.arange(7)).all()
    joined = (steps[..., 1:, :] & ~steps[..., :-1, :]).argmax(axis=-1)
    assert np.array_equal(joined, orders)


def test_gains_average_to_shapley_values_over_all_orders():
    values = some_values(4, prompts=1)[0]
    orders = np.array(list(permutations(range(4))))
    along = values[(subsets.chains(orders) * 2 ** np.arange(4)).sum(axis=-1)]
    gains = subsets.gains_by_unit(along, orders)
    np.testing.assert_allclose(gains.sum(axis=-1), values[-1] - values[0], atol=EXACT)
    np.testing.assert_allclose(gains.mean(axis=0), subsets.shapley(values), atol=EXACT)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(subsets.gains_by_unit(along, orders[::-1]).mean(axis=0), subsets.shapley(values))


@pytest.mark.parametrize("count", [3, 10, 200])
def test_an_interval_is_students(count):
    draws = np.random.default_rng(0).normal(2.0, 3.0, (count, 4))
    mean, half = subsets.mean_with_interval(draws)
    low, high = stats.t.interval(0.95, count - 1, loc=draws.mean(axis=0), scale=stats.sem(draws))
    np.testing.assert_allclose(mean, draws.mean(axis=0))
    np.testing.assert_allclose(2 * half, high - low, rtol=0.04 if count == 3 else 1e-3)


def test_two_draws_give_no_interval():
    mean, half = subsets.mean_with_interval(np.array([[1.0], [3.0]]))
    assert mean == 2.0
    assert np.isnan(half).all()
