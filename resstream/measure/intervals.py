"""Intervals of means: by resampling prompts, and for positive values with a long tail."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
from jaxtyping import Float

LEVEL = 0.95


def bootstrap(
    values: Float[np.ndarray, " prompt *rest"], seed: int = 0, draws: int = 1000
) -> tuple[Float[np.ndarray, "*rest"], Float[np.ndarray, "*rest"]]:
    """The 95% interval of a mean over prompts, from drawing as many prompts again and again.

    >>> low, high = bootstrap(np.array([1.0, 2.0, 3.0, 4.0]))
    >>> bool(1 <= low < 2.5 < high <= 4)
    True

    Args:
        values: one value, or an array of them, for each prompt.
        seed: of the draws.
        draws: how many.
    Source:
        Efron 1979, Bootstrap methods: another look at the jackknife.
    """
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(len(values), np.full(len(values), 1 / len(values)), size=draws)
    means = np.tensordot(counts / len(values), values, axes=1)
    ends = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return ends[0, ...], ends[1, ...]


def relative_error(values: Float[np.ndarray, " sample"]) -> float:
    """Half the width of the 95% interval of a mean of independent samples, relative to that mean.

    >>> round(relative_error(np.array([1.0, 2.0, 3.0])), 1)
    1.2

    It is infinite for a single sample. The samples are positive, and their tail may be long, so the interval is best
    taken as mean x exp(+-error).
    """
    if not values.any():
        return 0.0
    if len(values) < 2:
        return float("inf")
    return float(student(len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)) / values.mean())


def student(freedom: int) -> float:
    """How many standard errors a 95% interval reaches to each side, when the error itself was estimated.

    >>> [round(student(freedom), 2) for freedom in (1, 2, 3, 5, 10, 99)]
    [12.71, 4.3, 3.16, 2.57, 2.23, 1.98]

    Source:
        Abramowitz and Stegun 1964, equation 26.7.5, an expansion in 1/freedom that is good to 1% from 3 on; below that
        the distribution is that of a tangent, or of an algebraic function, which is turned around.
    """
    if freedom == 1:
        return math.tan(math.pi * LEVEL / 2)
    if freedom == 2:
        return LEVEL * math.sqrt(2 / (1 - LEVEL**2))
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))
