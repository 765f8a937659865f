"""Path lengths: a residual network as a sum over paths, and how much each length of path carries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from tqdm import tqdm

from resstream.check import Check
from resstream.errors import MetricError, SiteError
from resstream.measure.intervals import bootstrap
from resstream.measure.labels import carried_of, texts_of
from resstream.measure.metrics import Metric, Score, as_metric, extended
from resstream.measure.path_sums.path_counts import COVERAGE, count_paths
from resstream.measure.path_sums.path_statistics import (
    branch_statistics,
    exact_statistics,
    sampled_statistics,
    signed_statistics,
)
from resstream.models.tokens import Positions, Prompts, Tokens
from resstream.models.trunk import ResidualModel
from resstream.result import Result
from resstream.stream.edited import require_unedited
from resstream.stream.expand import Expansion
from resstream.stream.read import trace

# What is averaged over prompts, and what stands in for statistics that were not asked for.
_AVERAGED = ("norm", "share", "veit")
_SAMPLED = ("path_norm", "path_norm_low", "path_norm_high", "veit")
_SIGNED = ("rms", "rms_low", "rms_high")
_RANGES = ("effective_low", "effective_high", "effective_share")


def path_lengths(
    model: ResidualModel,
    prompts: Prompts,
    metric: Metric | Callable[[Tensor], Tensor] | None = None,
    *,
    unit: Literal["write", "layer"] = "write",
    start: int = 0,
    positions: Positions = None,
    by_branch: bool = False,
    samples: int = 64,
    signs: int = 8,
    seed: int = 0,
    progress: bool = False,
) -> Result:
    """Split a gradient exactly into the contributions of all paths through the network, by the length of the path.

    >>> import resstream as rs
    >>> model = rs.load("smollm2")
    >>> prompt = "When Mary and John went to the store, John gave a drink to"
    >>> r = rs.path_lengths(model, prompt, rs.logit_diff(" Mary", " John"), start=28, samples=0, signs=0)
    >>> r.settings["n_paths"], r.data["count"].values.tolist(), r.check.passed
    ('2^4', [1.0, 4.0, 6.0, 4.0, 1.0], True)

    Every write either is passed through (the factor J of its Jacobian) or is passed by (the factor 1), so the gradient
    at the start is a sum over 2^n paths. One pass down the network gives the sum of the C(n, k) paths of each length k
    exactly, in float64. What single paths carry is sampled besides. Where the model changes the stream itself, as a
    scaled skip or a norm on the trunk does, the factor of a path that passes by is the Jacobian K of that.

    Args:
        model: a model from `load`.
        prompts: a text, several texts, or token ids; each is expanded on its own.
        metric: the scalar whose gradient is split; by default the loss.
        unit: "write" counts attention and MLP branches as hops; "layer" counts whole blocks, so that a length of 1 then
            holds paths through one branch or through both.
        start: the layer at whose input the gradient is taken. All later layers' spectra come free on the way down.
        positions: at which positions the gradient is looked at, counted within each prompt; all by default. Position 0
            is an attention sink with residuals many times longer than the others', and `slice(1, None)` leaves it out.
        by_branch: whether to split by hops through attention and hops through MLPs, too, which takes about ten times as
            long; only with unit="write".
        samples: single paths drawn for each length, uniformly among the paths of that length; all of them where there
            are no more than that. 0 draws none, and leaves `path_norm` and what follows from it NaN.
        signs: programs with random signs run for `rms`; 0 runs none, and leaves it NaN.
        seed: which paths and signs are drawn.
        progress: whether to show a progress bar.
    Returns:
        Result over (prompt, path_length):
        `count`, the number of paths; `norm`, the length |c_k| of their coherent sum, and `share`, the signed part
        <c_k, g>/|g|^2 of the gradient g that this sum makes up (shares sum to 1); `rms`, the root of the sum of the
        squared norms of single paths, with a 95% interval `rms_low`, `rms_high`; `path_norm`, the mean norm of single
        paths (Veit's statistic), with `path_norm_low`, `path_norm_high`; `veit`, count x path_norm scaled to sum to 1.
        Over prompts: `gradient_norm` |g|, in metric units per unit of the stream; `kappa`, sum |c_k| / |g|, how much
        cancels; `completeness`, the relative difference between sum c_k and autograd; and `effective_low`,
        `effective_high`, `effective_share`: the shortest range of lengths with 95% of `veit`, and the share of all
        paths that it holds.
        Over (prompt, layer, path_length) `norm_from`, `share_from` and, over (prompt, layer), `kappa_from`: the same at
        the input of each later layer. With by_branch, `branch_norm`, `branch_share` over (prompt, attn_hops, mlp_hops).
        With several prompts, `share_mean`, `norm_mean` and `veit_mean` with bootstrap intervals `..._low`, `..._high`.
    Raises:
        SiteError: a start layer that the model does not have, or an unknown unit.
        PromptError: a position that a prompt does not have.
        MetricError: a metric whose gradient is zero everywhere, or a negative number of draws.
    Source:
        Veit, Wilber, Belongie 2016, Residual Networks Behave Like Ensembles of Relatively Shallow Networks; He et al.
        2016, Identity Mappings in Deep Residual Networks, section 3, for factors on the trunk.
    """
    if unit not in ("write", "layer") or (by_branch and unit == "layer"):
        also = " with by_branch=True" if by_branch else ""
        raise SiteError(f'unit="{unit}"{also} is not a unit of paths; write unit="write" or unit="layer"')
    if not 0 <= start < model.n_layers:
        raise SiteError(f"start={start}: {model.name} has layers 0-{model.n_layers - 1}; give one of them")
    if samples < 0 or signs < 0:
        raise MetricError(f"samples={samples}, signs={signs}: numbers of draws are 0 or more, such as samples=64")
    require_unedited(model, "path_lengths")
    metric = as_metric(metric)
    tokens = extended(model, model.tokenize(prompts), [metric])
    seen = tokens.at(positions)
    rng = np.random.default_rng(seed)
    exact_model = model.in_float64()
    score, quick_score = _bind(exact_model, tokens, metric), _bind(model, tokens, metric)
    tables = []
    with tqdm(total=len(tokens) * (1 + bool(samples) + bool(signs)), desc="path lengths", disable=not progress) as bar:
        for prompt in range(len(tokens)):
            alone, here = tokens.alone(prompt), seen[prompt, : tokens.lengths[prompt]]
            exact = Expansion.of(exact_model, alone, _of_prompt(score, prompt), unit=unit, start=start)
            table = exact_statistics(exact, here, metric.name)
            if by_branch:
                table |= branch_statistics(exact, here)
            bar.update()
            # Norms of single paths involve no cancelling sum, so the model's own precision serves them.
            quick = Expansion.of(model, alone, _of_prompt(quick_score, prompt), unit=unit, start=start)
            if signs:
                table |= signed_statistics(quick, here, signs, rng)
                bar.update()
            if samples:
                table |= sampled_statistics(quick, here, samples, rng)
                bar.update()
            tables.append(table)
    counts = count_paths(exact.widths)
    data = _dataset(tables, counts, start).assign_coords(text=("prompt", texts_of(tokens)))
    check = Check("sum over lengths = autograd's gradient", float(data.completeness.max()), 1e-8)
    settings = {
        "unit": unit,
        "start": start,
        "positions": "all" if positions is None else str(positions),
        "samples": samples,
        "signs": signs,
        "metric": metric.name,
        "units": metric.units,
        "coverage": COVERAGE,
        "n_paths": _spell_count(exact.widths),
        **carried_of(model),
    }
    return Result("path_lengths", model.name, data, check, _headline(data, settings), settings)


def _bind(model: ResidualModel, tokens: Tokens, metric: Metric) -> Score:
    with torch.no_grad():
        _, final = trace(model, model.trunk(tokens), [])
        return metric.bind(model, tokens, final)


def _of_prompt(score: Score, prompt: int) -> Callable[[Tensor], Tensor]:
    return lambda final: score(final, [prompt])


def _dataset(tables: Sequence[dict[str, Any]], counts: Sequence[int], start: int) -> xr.Dataset:
    """The statistics of all prompts with names on their dimensions, and their means where there are several."""
    layers = len(tables[0]["kappa_from"])
    dims = {
        "norm_from": ("prompt", "layer", "path_length"),
        "share_from": ("prompt", "layer", "path_length"),
        "kappa_from": ("prompt", "layer"),
        "branch_norm": ("prompt", "attn_hops", "mlp_hops"),
        "branch_share": ("prompt", "attn_hops", "mlp_hops"),
    }
    data = xr.Dataset(coords={"path_length": np.arange(len(counts)), "layer": np.arange(start, start + layers)})
    for name in tables[0]:
        values = np.array([table[name] for table in tables])
        data[name] = (dims.get(name, ("prompt", "path_length")[: values.ndim]), values)
    data["count"] = ("path_length", np.array(counts, dtype=float))
    for name in (*_SAMPLED, *_SIGNED, *_RANGES):
        if name not in data:
            data[name] = xr.full_like(data.kappa if name in _RANGES else data.norm, np.nan)
    if len(tables) > 1:
        for name in _AVERAGED:
            low, high = bootstrap(data[name].values)
            means = {"mean": data[name].values.mean(0), "low": low, "high": high}
            data = data.assign({f"{name}_{which}": ("path_length", values) for which, values in means.items()})
    return data.assign_coords(prompt=np.arange(len(tables)))


def _spell_count(widths: Sequence[int]) -> str:
    """The number of all paths, as a power where it is one."""
    bases = {1 + width for width in widths}
    return f"{bases.pop()}^{len(widths)}" if len(bases) == 1 else str(prod(1 + width for width in widths))


def _headline(data: xr.Dataset, settings: dict[str, Any]) -> str:
    first = data.isel(prompt=0)
    peak = int(first.norm.argmax("path_length"))
    where = f"by {settings['unit']} from layer {settings['start']}"
    text = f"{settings['n_paths']} paths {where}; |c_k| peaks at length {peak}"
    if settings["samples"]:
        text += (
            f", {COVERAGE:.0%} of Veit's histogram in lengths {int(first.effective_low)}-{int(first.effective_high)} "
            f"({float(first.effective_share):.2g} of all paths)"
        )
    carried = f"; {settings['trunk']}" if "trunk" in settings else ""
    return f"{text}; kappa {float(first.kappa):.2g}{carried}"
