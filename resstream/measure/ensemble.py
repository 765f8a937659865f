"""The layer ensemble: a model as all the smaller models that are left of it when some of its layers are taken away."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from resstream.check import Check
from resstream.errors import MetricError, SiteError
from resstream.measure.labels import carried_of, texts_of, to_numpy, with_carried
from resstream.measure.metrics import Metric, as_metric, at_last, extended
from resstream.measure.removals.removal import Removable, Tree, layer_of, require_known, stages_of, stand_ins
from resstream.measure.removals.subsets import (
    chains,
    gains_by_unit,
    interactions,
    level_means,
    mean_with_interval,
    members,
    members_up_to,
    moebius,
    order_totals,
    shapley,
)
from resstream.models.tokens import Prompts, Tokens
from resstream.models.trunk import TOLERANCE, ResidualModel, worst_of
from resstream.result import Result
from resstream.sites import Site, layers_from
from resstream.stream.edited import require_unedited
from resstream.stream.read import check_final, trace

# Up to how many units every subset is run: by default, and at most.
FEW, MOST = 12, 16
# Up to which order Moebius terms are still few enough to be run one by one when subsets are sampled.
LISTED_ORDERS = 2


def layer_ensemble(
    model: ResidualModel,
    prompts: Prompts,
    metric: Metric | Callable[[Tensor], Tensor] | None = None,
    *,
    unit: Literal["layer", "write"] = "layer",
    units: Sequence[int] | Sequence[str] | None = None,
    exact: bool | None = None,
    orders: int | None = None,
    how: Literal["skip", "mean", "resample"] = "skip",
    samples: int = 200,
    seed: int = 0,
    reference: Prompts | None = None,
    progress: bool = False,
) -> Result:
    """Run a model with only some of its layers, for every choice of them or a sample, and say what each layer is worth.

    >>> import resstream as rs
    >>> model = rs.load("smollm2")
    >>> prompt = "When Mary and John went to the store, John gave a drink to"
    >>> r = rs.layer_ensemble(model, prompt, rs.logit_diff(" Mary", " John"), units=range(24, 30))
    >>> r.data.sizes["subset"], r.check.passed
    (64, True)

    f(S) is the metric when, of the units, only those in S are kept; what the others write is removed. Layers that are
    not among the units always run. Where the model does something to the stream itself, such as a scaled skip or a norm
    on the trunk, that acts past a removed unit too, x <- after(before(x) + 0), so that the Moebius terms of a linear
    net are its paths, trunk factors included: with a skip of lambda, those of order k have n - k factors lambda.

    Args:
        model: a model from `load`.
        prompts: a text, several texts, or token ids.
        metric: what to measure; by default the loss on the prompts themselves.
        unit: what is kept or removed: a whole "layer", or one branch, a "write".
        units: which of them: layers by number, or writes by name, such as "5.attn"; all by default.
        exact: whether to run all 2^n subsets of n units, up to 16; by default where there are no more than 12.
            Otherwise random orders are drawn in which the units join one by one.
        orders: up to which order `order_total` is needed: all where exact, at most 2 where sampled, which is also what
            None gives.
        how: what stands in for a removed write: nothing for "skip", whether it is a branch's or a whole layer's;
            "mean" and "resample" as in `ablate_layers`.
        samples: how many orders are drawn for each prompt; every other one is the one before it backwards.
        seed: which orders are drawn, and which reference prompts "resample" takes.
        reference: prompts for "mean" and "resample"; by default the prompts themselves.
        progress: whether to show a progress bar.
    Returns:
        Result in the metric's units. Over (prompt, unit): `shapley`, what a unit adds to a set of others, on average;
        these sum to f(all) - f(none). Over (prompt, order): `level_mean`, the mean of f over all sets of as many units.
        Each has a 95% interval, `shapley_low`, `shapley_high`, `level_mean_low`, `level_mean_high`, for each prompt on
        its own: of no width where exact, NaN from fewer than 6 samples. `order_total`, the sum of the Moebius terms of
        each order, exact, NaN above the orders that are needed. Over prompts `base`, the metric of the whole model.
        Where exact, also over (prompt, subset): `value`, f itself, and `term`, its Moebius terms, by subset numbers in
        which bit i says that unit i is kept; over (prompt, unit, unit_2): `interaction`, the Shapley interaction index.
        Interrupting the sampling (Ctrl-C) returns what is done by then, `settings["samples_done"]`, with a warning.
    Raises:
        SiteError: a unit that the model does not have, or more than 16 of them where exact.
        MetricError: order totals above 2 of a sampled ensemble, or no samples.
        PromptError: reference prompts that are too short to resample from.
    Source:
        Veit, Wilber, Belongie 2016, section 3, for the ensemble; Shapley 1953; Grabisch and Roubens 1999 for the
        interaction index; Mitchell et al. 2022, Sampling Permutations for Shapley Value Estimation, for the sampling.
    """
    require_known(unit, ("layer", "write"), "unit")
    require_known(how, ("skip", "mean", "resample"), "how")
    require_unedited(model, "layer_ensemble")
    chosen = _chosen(model, unit, units)
    exact = len(chosen) <= FEW if exact is None else exact
    _require_feasible(len(chosen), unit, exact, orders, samples)
    metric = as_metric(metric)
    tokens = extended(model, model.tokenize(prompts), [metric])
    with torch.no_grad():
        start = Site(layer_of(chosen[0]), "resid_pre")
        found, final = trace(model, model.trunk(tokens), [start])
        score = metric.bind(model, tokens, final)
        base = to_numpy(score(final, range(len(tokens))))
        logits = model.readout(at_last(final, tokens, range(len(tokens))))
        own = check_final(model, tokens, logits)
        writes = stand_ins(model, tokens, reference, chosen, how, seed)
    tree = Tree(model, tokens, found[start], stages_of(model, chosen), writes, score)
    if exact:
        runs = _every_subset(tree, len(chosen), progress)
    else:
        listed = min(LISTED_ORDERS if orders is None else orders, len(chosen))
        runs = _random_orders(tree, len(chosen), listed, samples, seed, progress)
    names = [str(each) for each in chosen]
    coords: dict[str, Any] = {"unit": names, "order": range(len(chosen) + 1), "text": ("prompt", texts_of(tokens))}
    if exact:
        coords |= {"unit_2": names, "subset": range(2 ** len(chosen))}
    # Shapley values first: the first variable is the one that a table shows.
    data = xr.Dataset({"shapley": runs.variables["shapley"]} | runs.variables | {"base": ("prompt", base)}, coords)
    settings = {"unit": unit, "how": how, "metric": metric.name, "units": metric.units, "exact": exact, "seed": seed}
    settings |= {"samples": 0 if exact else samples, "samples_done": runs.samples, **carried_of(model)}
    # A difference of logits is as inexact as the logits, however small it is; other units have no scale but their own.
    scale = max(runs.largest, float(logits.abs().max()) if metric.units in ("logits", "nats") else 0.0)
    check = _check(data, own, scale, TOLERANCE[model.dtype])
    headline = with_carried(_headline(data, settings), model)
    return Result("layer_ensemble", model.name, data, check, headline, settings)


@dataclass(frozen=True)
class _Runs:
    """What was found: variables of the result, the largest value of any run, and how many orders were drawn."""

    variables: dict[str, Any]
    largest: float
    samples: int


def _every_subset(tree: Tree, units: int, progress: bool) -> _Runs:
    """Values of all subsets, and what follows from them."""
    kept = members(units)
    with tqdm(total=len(tree.tokens) * len(kept), desc="subsets", disable=not progress) as bar:
        values = tree.values(np.broadcast_to(kept, (len(tree.tokens), *kept.shape)), bar.update)
    means = level_means(values)
    variables = {
        "value": (("prompt", "subset"), values),
        "term": (("prompt", "subset"), moebius(values)),
        "interaction": (("prompt", "unit", "unit_2"), interactions(values)),
        "order_total": (("prompt", "order"), order_totals(means, units)),
        **_with_interval("shapley", "unit", shapley(values), 0.0),
        **_with_interval("level_mean", "order", means, 0.0),
    }
    return _Runs(variables, float(np.abs(values).max()), 0)


def _random_orders(tree: Tree, units: int, listed: int, samples: int, seed: int, progress: bool) -> _Runs:
    """Values of all small subsets, and along random orders in which the units join."""
    prompts, pairs = len(tree.tokens), -(-samples // 2)
    ends = np.concatenate([members_up_to(units, listed), np.ones((1, units), dtype=bool)])
    known = tree.values(np.broadcast_to(ends, (prompts, *ends.shape)))
    # As many pairs of orders at once as fill a chunk: fewer would leave it idle, more would be lost if interrupted.
    together = max(1, tree.rows // (2 * prompts * units))
    draws = _draws(tree.tokens, units, seed)
    done: list[tuple[np.ndarray, np.ndarray]] = []
    with tqdm(total=2 * pairs, desc="orders", disable=not progress) as bar:
        try:
            for start in range(0, pairs, together):
                orders = np.stack([next(draws) for _ in range(min(together, pairs - start))], axis=1)
                done.append((orders, _along(tree, orders, known[:, [0, -1]])))
                bar.update(2 * orders.shape[1])
        except KeyboardInterrupt:
            if not done:
                raise
    orders, values = (np.concatenate(each, axis=1) for each in zip(*done, strict=True))
    if orders.shape[1] < pairs:
        text = f"interrupted after {2 * orders.shape[1]} of {2 * pairs} samples; intervals say what these are worth"
        warnings.warn(text, stacklevel=3)
    # The two orders of a pair mirror each other, so they count as one draw; prompts draw on their own.
    means, half = mean_with_interval(values.mean(axis=2).swapaxes(0, 1))
    size = ends.sum(axis=1)
    for order in {*size}:
        means[:, order], half[:, order] = known[:, size == order].mean(axis=1), 0.0
    totals = np.full_like(means, np.nan)
    totals[:, : listed + 1] = order_totals(means[:, : listed + 1], units)
    gains = gains_by_unit(values, orders).mean(axis=2).swapaxes(0, 1)
    variables = {
        "order_total": (("prompt", "order"), totals),
        **_with_interval("shapley", "unit", *mean_with_interval(gains)),
        **_with_interval("level_mean", "order", means, half),
    }
    return _Runs(variables, float(np.abs(np.concatenate([known.ravel(), values.ravel()])).max()), 2 * orders.shape[1])


def _draws(tokens: Tokens, units: int, seed: int) -> Iterator[Int[np.ndarray, "prompt 2 unit"]]:
    """An order of the units and the same backwards, for each prompt; they depend on the seed and the prompt alone."""
    ids = [tokens.ids[prompt, :length].tolist() for prompt, length in enumerate(tokens.lengths)]
    rngs = [np.random.default_rng([seed, *each]) for each in ids]
    while True:
        orders = np.stack([rng.permutation(units) for rng in rngs])
        yield np.stack([orders, orders[:, ::-1]], axis=1)


def _along(
    tree: Tree, orders: Int[np.ndarray, "prompt pair 2 unit"], ends: Float[np.ndarray, "prompt 2"]
) -> Float[np.ndarray, "prompt pair 2 step"]:
    """The value at each step of some orders, between none and all units, whose values are known."""
    prompts, pairs, _, units = orders.shape
    inner = tree.values(chains(orders)[..., 1:-1, :].reshape(prompts, -1, units))
    none, all_ = (np.broadcast_to(ends[:, None, None, [end]], (prompts, pairs, 2, 1)) for end in (0, 1))
    return np.concatenate([none, inner.reshape(prompts, pairs, 2, -1), all_], axis=-1)


def _with_interval(name: str, dim: str, mean: np.ndarray, half: np.ndarray | float) -> dict[str, Any]:
    dims = ("prompt", dim)
    return {name: (dims, mean), f"{name}_low": (dims, mean - half), f"{name}_high": (dims, mean + half)}


def _chosen(model: ResidualModel, unit: str, units: Sequence[int] | Sequence[str] | None) -> list[Removable]:
    """The units, in the order in which they run."""
    if unit == "layer":
        asked: Any = "each" if units is None else list(units)
        for each in () if units is None else asked:
            if isinstance(each, str):
                raise SiteError(
                    f'units=["{each}"]: with unit="layer" they are layers by number, such as units=[0, 5]; '
                    'write unit="write" to name branches'
                )
        layers = sorted(set(layers_from(asked, n_layers=model.n_layers, model=model.name)))
        if not layers:
            raise SiteError("units=[]: there is nothing to remove; name some layers, such as units=[0, 5]")
        return list(layers)
    sites = {model.site(str(name)) for name in (model.writes if units is None else units)}
    states = [site for site in sites if not site.is_write]
    if states or not sites:
        raise SiteError(
            f"units={[str(site) for site in states]}: only what a branch writes can be removed; "
            f'name some, such as units=["{model.writes[0]}", "{model.writes[1]}"]'
        )
    return sorted(sites, key=lambda site: model.writes.index(str(site)))


def _require_feasible(units: int, unit: str, exact: bool, orders: int | None, samples: int) -> None:
    """Refuse what would take for ever, or would be noise."""
    if exact and units > MOST:
        raise SiteError(
            f"exact=True: {units} {unit}s have 2^{units} subsets, and more than 2^{MOST} are not run one by one; "
            f"name up to {MOST} of them with units=[...], or leave exact out to draw random orders"
        )
    if not exact and orders is not None and orders > LISTED_ORDERS:
        raise MetricError(
            f"orders={orders}: order totals above {LISTED_ORDERS} of a sampled ensemble would be noise, since that of "
            f"order k is C(n, k) times a difference of sampled means, here {comb(units, orders)} times; "
            f"write orders={LISTED_ORDERS}, or exact=True with up to {MOST} units"
        )
    if (orders is not None and orders < 0) or (not exact and samples < 1):
        raise MetricError(f"orders={orders}, samples={samples}: give no orders below 0, and at least one sample")


def _check(data: xr.Dataset, own: Check, scale: float, tolerance: float) -> Check:
    """The worst of three errors, each relative to what it is an error of."""
    none, all_ = data.level_mean.isel(order=0), data.level_mean.isel(order=-1)
    apart = {
        "the sum of the Shapley values": data.shapley.sum("unit", skipna=False) - (all_ - none),
        "the run of all units": all_ - data.base,
    }
    errors = {place: float(np.abs(error.values).max()) / max(scale, 1e-30) for place, error in apart.items()}
    errors["the base run"] = own.error
    worst = worst_of(errors)
    name = "Shapley values sum to f(all) - f(none), and f(all) is the model's own"
    return Check(name, errors[worst], tolerance, where=worst)


def _headline(data: xr.Dataset, settings: dict[str, Any]) -> str:
    mean = data[["shapley", "level_mean"]].mean("prompt")
    largest = mean.shapley.isel(unit=int(np.abs(mean.shapley.values).argmax()))
    half = (data.shapley_high - data.shapley).sel(unit=largest.unit)
    # Prompts were sampled on their own, so their errors add in squares.
    give = "" if settings["exact"] else f" ± {float(np.sqrt((half**2).sum())) / data.sizes['prompt']:.2g}"
    units = f"{data.sizes['unit']} {settings['unit']}s by {settings['how']}"
    runs = (
        f"all 2^{data.sizes['unit']} subsets of {units}"
        if settings["exact"]
        else f"{settings['samples_done']} orders of {units}"
    )
    ends = f"f(all) {float(mean.level_mean[-1]):.2f}, f(none) {float(mean.level_mean[0]):.2f} {settings['units']}"
    return f"{runs}; {ends}; largest Shapley value {largest.unit.values!s} ({float(largest):+.2f}{give})"
