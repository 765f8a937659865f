"""The statistics of a path expansion: coherent sums, sums of squares, and norms of single paths, by length."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from resstream.errors import MetricError
from resstream.measure.intervals import relative_error
from resstream.measure.labels import to_numpy
from resstream.measure.path_sums.path_counts import count_paths, draw_paths, effective_range, share_of_paths
from resstream.stream.expand import Expansion

NOTHING = 1e-10


def exact_statistics(exact: Expansion, here: Bool[Tensor, " pos"], metric: str) -> dict[str, Any]:
    """Norm and share of each length, at the start and at every later layer, and how well they add up to autograd.

    Raises:
        MetricError: a gradient that is zero everywhere.
    """
    # To first order, how far the metric moves when the last stream moves by its own length; a metric at its minimum,
    # such as the divergence of a run from itself, moves by rounding errors only.
    reach = exact.top.norm() * exact.steps[-1].x.norm()
    autograd = exact.backward()[here]
    size = autograd.norm()
    if not (size > 0 and reach > NOTHING):
        raise MetricError(
            f"the gradient of '{metric}' is {float(size):.2g} everywhere, so there is nothing to split; "
            "give a metric that depends on the run, such as rs.logit_diff(...)"
        )
    layers = sorted({step.layer for step in exact.steps})
    norms = np.zeros((len(layers), 1 + len(exact.steps)))
    shares, kappas = np.zeros_like(norms), np.zeros(len(layers))
    for number, probes in exact.descend():
        split = probes[0][:, here]
        # The last step of a layer on the way down is its first, and leaves what holds at the layer's input.
        row, whole = layers.index(exact.steps[number].layer), split.sum(0)
        norms[row, : len(split)] = to_numpy(split.flatten(1).norm(dim=1))
        shares[row, : len(split)] = to_numpy((split * whole).sum((1, 2)) / whole.norm() ** 2)
        kappas[row] = norms[row].sum() / float(whole.norm())
    return {
        "norm": norms[0],
        "share": to_numpy((split * autograd).sum((1, 2)) / size**2),
        "kappa": float(norms[0].sum() / float(size)),
        "gradient_norm": float(size),
        "completeness": float((split.sum(0) - autograd).norm() / size),
        "norm_from": norms,
        "share_from": shares,
        "kappa_from": kappas,
    }


def branch_statistics(exact: Expansion, here: Bool[Tensor, " pos"]) -> dict[str, Any]:
    """Norm and share by the number of attention hops and the number of MLP hops."""
    split = exact.by_branch()[:, :, here]
    whole = split.sum((0, 1))
    return {
        "branch_norm": to_numpy(split.flatten(2).norm(dim=2)),
        "branch_share": to_numpy((split * whole).sum((2, 3)) / whole.norm() ** 2),
    }


def signed_statistics(
    quick: Expansion, here: Bool[Tensor, " pos"], signs: int, rng: np.random.Generator
) -> dict[str, Any]:
    """The root of the sum of squares over single paths, by length, from the same program with random signs.

    With a sign of its own at every hop, cross terms of different paths vanish in the mean: E |c_k|^2 = sum |g_S|^2.
    """
    drawn = torch.from_numpy(rng.choice([-1, 1], size=(signs, len(quick.steps), max(quick.widths))))
    *_, (_, probes) = quick.descend(drawn.to(quick.top))
    squares = to_numpy(probes[:, :, here].flatten(2).square().sum(2))
    means = squares.mean(0)
    # Where there is a single path, its square does not depend on its sign.
    single = np.array(count_paths(quick.widths)) == 1
    errors = np.array([0.0 if alone else relative_error(each) for alone, each in zip(single, squares.T, strict=True)])
    return {
        "rms": np.sqrt(means),
        "rms_low": np.sqrt(means / np.exp(errors)),
        "rms_high": np.sqrt(means * np.exp(errors)),
    }


def sampled_statistics(
    quick: Expansion, here: Bool[Tensor, " pos"], samples: int, rng: np.random.Generator
) -> dict[str, Any]:
    """Mean norm of single paths of each length, with a 95% interval; exact where all paths were taken."""
    counts = count_paths(quick.widths)
    paths = draw_paths(quick.widths, samples, rng)
    lengths = (paths >= 0).sum(axis=1)
    norms = np.concatenate([_norms(vectors[:, here]) for vectors in quick.of_paths(paths)])
    groups = [norms[lengths == length] for length in range(len(counts))]
    means = np.array([group.mean() for group in groups])
    complete = [len(group) == count for group, count in zip(groups, counts, strict=True)]
    # Norms are positive with a long tail, so the interval is taken on their logarithm's scale.
    factors = np.exp([0.0 if known else relative_error(group) for group, known in zip(groups, complete, strict=True)])
    weights = np.array(counts, dtype=float) * means
    low, high = effective_range(weights)
    return {
        "path_norm": means,
        "path_norm_low": means / factors,
        "path_norm_high": means * factors,
        "veit": weights / weights.sum(),
        "effective_low": low,
        "effective_high": high,
        "effective_share": share_of_paths(counts, low, high),
    }


def _norms(vectors: Float[Tensor, "path pos d_model"]) -> Float[np.ndarray, " path"]:
    return to_numpy(vectors.flatten(1).norm(dim=1))
