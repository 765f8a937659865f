"""Activation patching: which activation, moved from one run into another, carries the answer with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool
from torch import Tensor

from resstream.errors import PromptError, SiteError, listed
from resstream.measure.labels import names_of, prompt_coords, to_numpy
from resstream.measure.metrics import Metric, as_metric, at_last
from resstream.models.tokens import Prompts, Tokens, join
from resstream.models.trunk import ResidualModel
from resstream.result import Result
from resstream.sites import KINDS, Site, layers_from
from resstream.stream.edited import require_unedited
from resstream.stream.read import check_final, trace
from resstream.stream.run import Base, Row, Score, entries, entry_after, run


def patch_activations(
    model: ResidualModel,
    clean: Prompts,
    corrupted: Prompts,
    metric: Metric | Callable[[Tensor], Tensor],
    *,
    sites: str | Sequence[str] = "resid_pre",
    direction: Literal["denoise", "noise"] = "denoise",
    positions: Literal["each", "all"] | int | Sequence[int] = "each",
    layers: Literal["each"] | int | Sequence[int] = "each",
    progress: bool = False,
) -> Result:
    """Replace one activation of one run by the other run's, for every layer and position, and measure what that does.

    >>> import resstream as rs
    >>> model = rs.load("smollm2")
    >>> grid = rs.patch_activations(
    ...     model,
    ...     "When Mary and John went to the store, John gave a drink to",
    ...     "When Mary and John went to the store, Mary gave a drink to",
    ...     rs.logit_diff(" Mary", " John"),
    ... )
    >>> grid.data.clean.round(decimals=3).item(), grid.data.corrupted.round(decimals=3).item()
    (6.12, -5.485)
    >>> grid.data.effect.shape
    (1, 1, 30, 14)

    Denoising moves clean activations into the corrupted run: an effect of 1 says that this activation is enough to
    restore the answer. Noising moves corrupted activations into the clean run: an effect of 1 says that the answer
    cannot do without it. The two differ, and neither implies the other.

    Args:
        model: a model from `load`.
        clean: prompts with the behaviour.
        corrupted: their partners, one by one, with as many tokens each.
        metric: what to measure, such as `rs.logit_diff(...)`, or a function of the logits.
        sites: kinds of place to patch: "resid_pre", "resid_mid", "resid_post", "attn", "mlp", one or several.
        direction: "denoise" or "noise".
        positions: "each" position on its own, "all" at once, or a list of positions, each on its own; negative ones
            count from the end of each prompt.
        layers: "each", a number, or several.
        progress: whether to show a progress bar.
    Returns:
        Result over (prompt, site, layer, position): `metric` in the metric's units and `effect`, which is 0 where the
        patch does nothing and 1 where it moves the metric all the way; and over prompts, `clean` and `corrupted`.
        Where these two coincide the effect is NaN. With positions="all" there is no position dimension.
    Raises:
        PromptError: prompts of different lengths; the message shows both token lists.
        SiteError: no such place, or layer.
    Source:
        Meng et al. 2022 (ROME); Heimersheim and Nanda 2024, How to use and interpret activation patching.
    """
    if direction not in ("denoise", "noise"):
        raise SiteError(f'direction="{direction}" is not a way to patch; write "denoise" or "noise"')
    require_unedited(model, "patch_activations")
    pair, count = _pair(model, clean, corrupted)
    kinds = _kinds(model, sites)
    chosen_layers = list(dict.fromkeys(layers_from(layers, n_layers=model.n_layers, model=model.name)))
    if not chosen_layers:
        raise SiteError('no layers to patch; write layers="each" or a list such as [0, 5]')
    if not isinstance(positions, str):
        positions = [positions] if isinstance(positions, int) else list(dict.fromkeys(positions))
    columns = _columns(pair.take(range(count)), positions)
    metric = as_metric(metric)
    with torch.no_grad():
        values, final = trace(model, model.trunk(pair), _needed(model, kinds))
        score = _bind(metric, model, pair, final)
        scores = score(final, range(len(pair)))
        check = check_final(model, pair, model.readout(at_last(final, pair, range(len(pair)))))
        # Clean prompts come first in the batch, and each one's corrupted twin is `count` rows further on.
        cells = list(product(range(count), kinds, chosen_layers, range(len(columns))))
        cells = [cell for cell in cells if bool(columns[cell[3]][cell[0]].any())]
        rows = []
        for prompt, kind, layer, column in cells:
            target, donor = (prompt + count, prompt) if direction == "denoise" else (prompt, prompt + count)
            rows.append(_row(model, values, Site(layer, kind), target, donor, columns[column][prompt]))
        found = run(model, Base(pair, values, scores), rows, score, progress="patching" if progress else None)
    grid = np.full((count, len(kinds), len(chosen_layers), len(columns)), np.nan)
    places = [(prompt, kinds.index(kind), chosen_layers.index(layer), column) for prompt, kind, layer, column in cells]
    grid[tuple(np.array(places).T)] = to_numpy(found)
    data = _dataset(grid, to_numpy(scores[:count]), to_numpy(scores[count:]), direction)
    data = data.isel(position=0, drop=True) if positions == "all" else data
    data = data.assign_coords(site=kinds, layer=chosen_layers, **_labels(pair, count, positions))
    settings = {"direction": direction, "metric": metric.name, "units": metric.units, "positions": names_of(positions)}
    return Result("patch_activations", model.name, data, check, _headline(data, direction, metric.units), settings)


def _row(
    model: ResidualModel, values: dict[Site, Tensor], site: Site, target: int, donor: int, here: Bool[Tensor, " pos"]
) -> Row:
    """The target's run with a site's value taken from the donor's run at some positions."""
    own, other = values[site][target], values[site][donor]
    # Positions at which nothing changes keep the base run's own bits.
    changed = (here & (own != other).any(-1))[:, None]
    if not site.is_write:
        enter = entry_after(model, site.layer) if site.kind == "resid_post" else site
        return Row(target, enter, lambda: torch.where(changed, other, own), twins=(donor,))
    sequential_attn = site.kind == "attn" and model.layout == "sequential"
    enter = Site(site.layer, "resid_mid") if sequential_attn else entry_after(model, site.layer)
    after = values[enter][target]
    return Row(target, enter, lambda: torch.where(changed, after + (other - own), after), twins=(donor,))


def _pair(model: ResidualModel, clean: Prompts, corrupted: Prompts) -> tuple[Tokens, int]:
    """Clean and corrupted prompts as one batch, once they are known to pair up token by token."""
    first, second = model.tokenize(clean), model.tokenize(corrupted)
    if len(first) != len(second):
        raise PromptError(f"{len(first)} clean prompts, but {len(second)} corrupted ones; give them in pairs")
    for number, (one, other) in enumerate(zip(first.strings, second.strings, strict=True)):
        if len(one) != len(other):
            raise PromptError(
                f"pair {number} does not align: the clean prompt has {len(one)} tokens, the other {len(other)}\n"
                f"  clean:     {list(one)}\n  corrupted: {list(other)}\n"
                "positions could not be matched; rephrase one so that both have as many tokens"
            )
    return join(first, second), len(first)


def _bind(metric: Metric, model: ResidualModel, pair: Tokens, final: Tensor) -> Score:
    """Bind a metric to the clean and to the corrupted prompts, each on their own: a pair shares its answer."""
    count = len(pair) // 2
    halves = [slice(count), slice(count, None)]
    bound = [metric.bind(model, pair.take(range(len(pair))[half]), final[half]) for half in halves]

    def score(final: Tensor, prompts: Sequence[int]) -> Tensor:
        rows = [[row for row, prompt in enumerate(prompts) if prompt // count == half] for half in (0, 1)]
        found = [
            part(final[some], [prompts[row] % count for row in some])
            for part, some in zip(bound, rows, strict=True)
            if some
        ]
        return torch.cat(found)[torch.tensor(rows[0] + rows[1]).argsort()]

    return score


def _kinds(model: ResidualModel, sites: str | Sequence[str]) -> list[str]:
    kinds = [sites] if isinstance(sites, str) else list(sites)
    for kind in kinds:
        if kind not in KINDS:
            raise SiteError(
                f'sites="{kind}" is not a kind of place to patch; choose from {listed(KINDS)}, '
                "and say which layers with layers=[...]"
            )
        model.site(Site(0, kind))
    if not kinds:
        raise SiteError(f"no sites to patch; choose from {listed(KINDS)}")
    return list(dict.fromkeys(kinds))


def _needed(model: ResidualModel, kinds: Sequence[str]) -> set[Site]:
    """The states that rows start from, and every value that is patched."""
    return {*entries(model), *(Site(layer, kind) for layer in range(model.n_layers) for kind in kinds)}


def _columns(tokens: Tokens, positions: str | Sequence[int]) -> list[Bool[Tensor, "prompt pos"]]:
    """For each column of the grid, which positions of each prompt it patches."""
    if positions == "all":
        return [tokens.mask]
    if positions == "each":
        everywhere = torch.eye(tokens.width, dtype=torch.bool, device=tokens.ids.device)
        return [tokens.mask & column for column in everywhere]
    if isinstance(positions, str):
        raise PromptError(
            f'positions="{positions}" is not a choice of positions; write "each", "all" or a list such as [-1]'
        )
    if not positions:
        raise PromptError('no positions to patch; write positions="each", "all" or a list such as [-1]')
    return [tokens.at(position) for position in positions]


def _labels(pair: Tokens, count: int, positions: str | Sequence[int]) -> dict[str, Any]:
    """Positions, and the tokens that stand there in both runs."""
    clean, corrupted = (prompt_coords(pair.take(half)) for half in (range(count), range(count, 2 * count)))
    if positions == "all":
        return {name: clean[name] for name in ("prompt", "length")}
    coords = {**clean, "corrupted_token": corrupted["token"]}
    if not isinstance(positions, str):
        for name, rows in (("token", pair.strings[:count]), ("corrupted_token", pair.strings[count:])):
            coords[name] = (("prompt", "position"), [[row[position] for position in positions] for row in rows])
        coords["position"] = list(positions)
    return coords


def _dataset(grid: np.ndarray, clean: np.ndarray, corrupted: np.ndarray, direction: str) -> xr.Dataset:
    """The grid in the metric's units, and normalised: 0 where a patch does nothing, 1 where it moves it all the way."""
    start, end = (corrupted, clean) if direction == "denoise" else (clean, corrupted)
    gap = end - start
    if (gap == 0).any():
        warnings.warn(
            f"clean and corrupted runs have the same metric for prompts {np.flatnonzero(gap == 0).tolist()}: "
            "there is nothing to restore, so their effect is NaN",
            stacklevel=3,
        )
    spread = (slice(None), None, None, None)
    with np.errstate(invalid="ignore", divide="ignore"):
        effect = np.where(gap[spread] == 0, np.nan, (grid - start[spread]) / gap[spread])
    dims = ("prompt", "site", "layer", "position")
    return xr.Dataset(
        {
            "metric": (dims, grid),
            "effect": (dims, effect),
            "clean": ("prompt", clean),
            "corrupted": ("prompt", corrupted),
        }
    )


def _headline(data: xr.Dataset, direction: str, units: str) -> str:
    """The strongest cell of the mean over prompts."""
    mean = data.effect.mean("prompt")
    goal = "restores" if direction == "denoise" else "removes"
    if not bool(mean.notnull().any()):
        return "clean and corrupted runs have the same metric, so no effect is defined"
    best = mean.isel(mean.argmax(...))
    place = f"{int(best.layer)}.{best.site.values!s}"
    where = ""
    if "position" in best.coords:
        token = str(data.token.sel(position=best.position).values[0])
        where = f" at position {int(best.position)} ({token!r})"
    gap = f"{float(data.clean.mean()):.2f} against {float(data.corrupted.mean()):.2f} {units}"
    return f"{direction}: {place}{where} {goal} {float(best):.0%} of the gap ({gap})"
