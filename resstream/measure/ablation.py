"""Ablation: what a model loses without a layer, or without one of its branches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from resstream.errors import SiteError
from resstream.measure.labels import carried_of, names_of, texts_of, to_numpy, with_carried
from resstream.measure.metrics import Metric, as_metric, at_last, extended
from resstream.measure.removals.removal import How, Removable, layer_of, require_known, stand_ins, writes_of
from resstream.models.tokens import Prompts
from resstream.models.trunk import ResidualModel
from resstream.result import Result
from resstream.sites import Site, layers_from
from resstream.stream.edited import require_unedited
from resstream.stream.read import check_final
from resstream.stream.rows import Base, Put, Row
from resstream.stream.run import run, score_all

Unit = Literal["layer", "attn", "mlp", "head"]


def ablate_layers(
    model: ResidualModel,
    prompts: Prompts,
    *,
    unit: Unit = "layer",
    how: How = "skip",
    layers: str | int | Sequence[int | str] | Sequence[Sequence[int | str]] = "each",
    metric: Metric | Callable[[Tensor], Tensor] | None = None,
    reference: Prompts | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Result:
    """Remove layers one at a time, or in sets, and measure what the model loses.

    >>> import resstream as rs
    >>> model = rs.load("smollm2")
    >>> r = rs.ablate_layers(model, "The Eiffel Tower is in the city of", metric=rs.log_prob(" Paris"))
    >>> r.data.sizes["unit"], r.data.effect.min("unit").item() < -5
    (30, True)

    What is removed is what the unit adds to the stream; the layers above then run on what is left.

    Args:
        model: a model from `load`.
        prompts: a text, several texts, or token ids.
        unit: what to remove: a whole "layer", only its "attn" or "mlp" branch, or an attention "head".
        how: "skip" runs the model without it; "zero" puts zeros in place of its write, which on a plain residual
            stream is the same thing; "mean" puts its mean write over all real tokens of the reference prompts;
            "resample" puts, at each position, the write of another reference prompt, drawn at random. Where the model
            does something to the stream itself, such as a scaled skip or a norm on the trunk, whatever takes the place
            of a write goes through that, nothing too: x <- after(before(x) + 0). Only a whole layer that is skipped is
            left out together with it, as rs.Skip does, so that the stream stays as it was.
        layers: "each" one alone, a number, several numbers (each alone), or several lists (each removed together). With
            unit="head" a number stands for each head of that layer, and heads can be named, such as "5.head.3".
        metric: what to measure; by default the loss on the prompts themselves.
        reference: prompts for "mean" and "resample"; by default the prompts themselves.
        seed: which reference prompts "resample" draws.
        progress: whether to show a progress bar.
    Returns:
        Result over (prompt, unit): `metric`, and `effect`, its change from the unablated `base` (prompt), both in the
        metric's units.
    Raises:
        SiteError: a layer that the model does not have, or an unknown unit or way to remove it.
        PromptError: reference prompts that are too short to resample from.
        UnsupportedModelError: heads that cannot be told apart.
    Source:
        Veit, Wilber, Belongie 2016, section 4.1; McGrath et al. 2023, The Hydra Effect, for resampling.
    """
    require_known(unit, ("layer", "attn", "mlp", "head"), "unit")
    require_known(how, ("skip", "zero", "mean", "resample"), "how")
    require_unedited(model, "ablate_layers")
    sets = _sets(model, layers, unit)
    metric = as_metric(metric)
    tokens = extended(model, model.tokenize(prompts), [metric])
    base = Base.of(model, tokens)
    scores = [metric.bind(model, tokens, base.final)]
    baseline = score_all(scores, base)
    with torch.no_grad():
        check = check_final(model, tokens, model.readout(at_last(base.final, tokens, range(len(tokens)))))
        units = list(dict.fromkeys(part for chosen in sets for part in chosen))
        instead = stand_ins(model, tokens, reference, units, how, seed)
    skips = how == "skip" and unit == "layer"
    rows = [
        _skipping(prompt, chosen) if skips else _row(model, prompt, chosen, instead[prompt], tokens.width)
        for prompt in range(len(tokens))
        for chosen in sets
    ]
    found = run(model, base, rows, scores, baseline, progress="ablating" if progress else None)
    values_by_set = to_numpy(found).reshape(len(tokens), len(sets))
    unablated = to_numpy(baseline[:, 0])
    dims = ("prompt", "unit")
    effect = values_by_set - unablated[:, None]
    data = xr.Dataset(
        {"metric": (dims, values_by_set), "effect": (dims, effect), "base": ("prompt", unablated)},
        coords={
            "unit": ["+".join(map(str, chosen)) or "none" for chosen in sets],
            "text": ("prompt", texts_of(tokens)),
        },
    )
    settings = {"unit": unit, "how": how, "metric": metric.name, "units": metric.units, "layers": names_of(layers)}
    headline = with_carried(_headline(data, unit, how, metric.units), model)
    return Result("ablate_layers", model.name, data, check, headline, settings | carried_of(model))


def _skipping(prompt: int, layers: Sequence[Removable]) -> Row:
    """The run of one prompt without some layers, from below the first of them."""
    return Row(prompt, _below(layers), skip=frozenset(map(layer_of, layers)))


def _row(
    model: ResidualModel, prompt: int, units: Sequence[Removable], instead: Mapping[Removable, Tensor], width: int
) -> Row:
    """The run of one prompt without what some units write, from below the first of them."""
    change: dict[Site, Put | None] = {}
    for unit in units:
        sites = writes_of(model, unit) if isinstance(unit, int) else [_moved(unit)]
        # One write may stand in for both branches of a layer; the first of them takes it.
        given = {site: instead.get(site) for site in sites} | ({sites[0]: instead[unit]} if unit in instead else {})
        change |= {site: None if put is None else Put(put.expand(width, -1)) for site, put in given.items()}
    return Row(prompt, _below(units), change=change)


def _below(units: Sequence[Removable]) -> Site:
    return Site(min(map(layer_of, units), default=0), "resid_pre")


def _moved(unit: Site) -> Site:
    """A head is removed through its z, so that whatever follows is the model's own."""
    return Site(unit.layer, "z", unit.part) if unit.kind == "head" else unit


def _sets(model: ResidualModel, layers: str | int | Sequence[Any], unit: Unit) -> list[tuple[Removable, ...]]:
    """The sets of units to remove; a plain list means each of its members alone, a number each head of a layer."""
    groups: Sequence[Any] = [layers] if isinstance(layers, (str, int)) and layers != "each" else layers
    if layers == "each":
        groups = range(model.n_layers)
    sets: list[tuple[Removable, ...]] = []
    for group in groups:
        together = not isinstance(group, (int, str))
        units = [each for member in (group if together else [group]) for each in _units(model, member, unit)]
        chosen = sorted(set(units), key=lambda each: (layer_of(each), str(each)))
        sets += [tuple(chosen)] if together else [(each,) for each in units]
    if not sets:
        raise SiteError("no layers to remove; write layers='each', or a list such as [0, 5] or [[0, 5]]")
    return sets


def _units(model: ResidualModel, member: int | str, unit: Unit) -> list[Removable]:
    if unit == "head":
        model.require_inside("z")
        if isinstance(member, str) and member != "each":
            site = model.site(member)
            if site.kind != "head" or site.part is None:
                raise SiteError(f'"{member}" is not a head; write a name such as "{site.layer}.head.0"')
            return [site]
    found = layers_from(member, n_layers=model.n_layers, model=model.name)
    if unit == "layer":
        return list(found)
    if unit == "head":
        return [Site(layer, "head", head) for layer in found for head in range(model.n_heads)]
    return [Site(layer, unit) for layer in found]


def _headline(data: xr.Dataset, unit: str, how: str, units: str) -> str:
    mean = data.effect.mean("prompt")
    largest = mean.isel(unit=int(np.abs(mean.values).argmax()))
    return (
        f"{mean.sizes['unit']} x {unit} by {how}; largest effect {largest.unit.values!s} "
        f"({float(largest):+.2f} {units}), median {float(mean.median()):+.3f}"
    )
