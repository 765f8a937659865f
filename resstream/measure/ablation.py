"""Ablation: what a model loses without a layer, or without one of its branches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from resstream.errors import SiteError
from resstream.measure.labels import names_of, texts_of, to_numpy
from resstream.measure.metrics import Metric, as_metric, at_last
from resstream.measure.removal import How, Removable, require_known, stand_ins
from resstream.models.tokens import Prompts
from resstream.models.trunk import ResidualModel
from resstream.result import Result
from resstream.sites import WRITES, Site, layers_from
from resstream.stream.edited import require_unedited
from resstream.stream.read import check_final, trace
from resstream.stream.run import Base, Row, entries, run

Unit = Literal["layer", "attn", "mlp"]


def ablate_layers(
    model: ResidualModel,
    prompts: Prompts,
    *,
    unit: Unit = "layer",
    how: How = "skip",
    layers: Literal["each"] | int | Sequence[int] | Sequence[Sequence[int]] = "each",
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
        unit: what to remove: a whole "layer", or only its "attn" or "mlp" branch.
        how: "skip" runs the model without it; "zero" puts zeros in place of its write, which on a residual stream is
            the same thing; "mean" puts its mean write over all real tokens of the reference prompts; "resample" puts,
            at each position, the write of another reference prompt, drawn at random.
        layers: "each" one alone, a number, several numbers (each alone), or several lists (each removed together).
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
    Source:
        Veit, Wilber, Belongie 2016, section 4.1; McGrath et al. 2023, The Hydra Effect, for resampling.
    """
    require_known(unit, ("layer", "attn", "mlp"), "unit")
    require_known(how, ("skip", "zero", "mean", "resample"), "how")
    require_unedited(model, "ablate_layers")
    sets = _sets(model, layers)
    tokens = model.tokenize(prompts)
    metric = as_metric(metric)
    with torch.no_grad():
        values, final = trace(model, model.trunk(tokens), entries(model))
        score = metric.bind(model, tokens, final)
        scores = score(final, range(len(tokens)))
        check = check_final(model, tokens, model.readout(at_last(final, tokens, range(len(tokens)))))
        kinds = WRITES if unit == "layer" else (unit,)
        units = [_unit(layer, kinds) for layer in range(model.n_layers)]
        writes = stand_ins(model, tokens, reference, units, how, seed)
        rows = [_row(values, prompt, chosen, kinds, writes[prompt]) for prompt in range(len(tokens)) for chosen in sets]
        found = run(model, Base(tokens, values, scores), rows, score, progress="ablating" if progress else None)
    values_by_set = to_numpy(found).reshape(len(tokens), len(sets))
    base = to_numpy(scores)
    dims = ("prompt", "unit")
    data = xr.Dataset(
        {"metric": (dims, values_by_set), "effect": (dims, values_by_set - base[:, None]), "base": ("prompt", base)},
        coords={"unit": [_name(chosen, unit) for chosen in sets], "text": ("prompt", texts_of(tokens))},
    )
    settings = {"unit": unit, "how": how, "metric": metric.name, "units": metric.units, "layers": names_of(layers)}
    return Result("ablate_layers", model.name, data, check, _headline(data, unit, how, metric.units), settings)


def _row(
    values: Mapping[Site, Tensor],
    prompt: int,
    layers: Sequence[int],
    kinds: Sequence[str],
    writes: Mapping[Removable, Tensor],
) -> Row:
    """The run of one prompt without some layers, from below the first of them."""
    enter = Site(min(layers, default=0), "resid_pre")
    change: dict[Site, Tensor | None] = {Site(layer, kind): None for layer in layers for kind in kinds}
    if writes:
        # A layer's stand-in is one write for both its branches; the first of them carries it.
        change |= {Site(layer, kinds[0]): writes[_unit(layer, kinds)] for layer in layers}
    return Row(prompt, enter, lambda: values[enter][prompt], change)


def _unit(layer: int, kinds: Sequence[str]) -> Removable:
    return layer if tuple(kinds) == WRITES else Site(layer, kinds[0])


def _sets(model: ResidualModel, layers: str | int | Sequence[int] | Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The sets of layers to remove; a plain list of numbers means each of them alone."""
    groups: Sequence[Any] = [[layer] for layer in range(model.n_layers)] if layers == "each" else layers  # type: ignore[assignment]
    if isinstance(layers, (str, int)) and layers != "each":
        groups = [layers]
    each = [layers_from(group, n_layers=model.n_layers, model=model.name) for group in groups]
    if not each:
        raise SiteError("no layers to remove; write layers='each', or a list such as [0, 5] or [[0, 5]]")
    return [tuple(sorted(set(group))) for group in each]


def _name(layers: tuple[int, ...], unit: str) -> str:
    ending = "" if unit == "layer" else f".{unit}"
    return "+".join(f"{layer}{ending}" for layer in layers) or "none"


def _headline(data: xr.Dataset, unit: str, how: str, units: str) -> str:
    mean = data.effect.mean("prompt")
    largest = mean.isel(unit=int(np.abs(mean.values).argmax()))
    return (
        f"{mean.sizes['unit']} x {unit} by {how}; largest effect {largest.unit.values!s} "
        f"({float(largest):+.2f} {units}), median {float(mean.median()):+.3f}"
    )
