"""Stream health: how large the stream and its writes are, what attention and precision do, and which pitfalls show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import torch
import xarray as xr

from resstream.check import Check
from resstream.errors import UnsupportedModelError
from resstream.measure.labels import carried_of, texts_of, with_carried
from resstream.measure.metrics import at_last, loss
from resstream.measure.removals.removal import require_known
from resstream.measure.vitals.boundary_gradients import boundary_gradients
from resstream.measure.vitals.layer_worth import layer_worth
from resstream.measure.vitals.precision_drift import PRECISIONS, precision_drift
from resstream.measure.vitals.stream_statistics import Passage, passage
from resstream.measure.vitals.verdicts import About, verdicts
from resstream.models.tokens import Prompts, Tokens
from resstream.models.trunk import ResidualModel
from resstream.result import Result
from resstream.stream.edited import require_unedited
from resstream.stream.read import check_final
from resstream.stream.rows import Base
from resstream.stream.walk import states_of

# A first position that is this much larger than the others, in the median, is said to be a sink.
_SINK = 10.0
# An entry counts as a massive activation from this size on, and this many times the median: Sun et al. 2024, section 2.
_MASSIVE, _TIMES = 100.0, 1000.0


def stream_health(
    model: ResidualModel,
    prompts: Prompts,
    *,
    gradients: bool = True,
    precision: str | Sequence[str] = ("bfloat16",),
    progress: bool = False,
) -> Result:
    """Examine a model's stream: sizes, writes, ranks, attention, gradient, precision, and a verdict for each pitfall.

    >>> import resstream as rs
    >>> text = "The Eiffel Tower is in the city of Paris."
    >>> health = rs.stream_health(rs.load("smollm2"), text, precision=())
    >>> bool(health.data.found.any()), "position 0 is a sink" in health.headline
    (False, True)
    >>> print(health.data.evidence.sel(pitfall="depth dilution").item())
    a write is 0.2... of the stream in the first quarter, 0.2... in the last (medians)

    A model that is given in half precision is measured in float32, and its own precision is one of those compared.

    Args:
        model: a model from `load`, or of the lab.
        prompts: a text, several texts, or token ids; each of two tokens or more. A few hundred tokens of usual text
            make the verdicts sound; below six no layer can be said to pollute.
        gradients: whether to take the gradient of the loss.
        precision: types in which the trunk is tried, "bfloat16" or "float16", one or several; () for none.
        progress: whether to show a progress bar.
    Returns:
        Result over (prompt, site), the states of the stream: `norm` and `variance` (medians), `effective_rank`,
        `rank_residual` and `token_cosine`, all of tokens but the first, `first_norm` (position 0), `gradient_norm`
        (nats per unit of stream), and `own_drift`, relative, from the float64 sum of the same writes. Over (prompt,
        write): `ratio` (size against the stream), `cosine`, `one_sided`. Over (prompt, layer, head): `entropy` (share
        of what is possible) and `first_share` (attention on position 0). Over (prompt, site, top):
        `outlier_dimension`, `outlier_size` and `outlier_times` (the median entry). Over (precision, prompt, site):
        `trunk_drift` and `model_drift`, relative. Over (prompt, layer): `effect`, the change of `loss` (prompt) without
        a layer, in nats, with `effect_error` (layer). Over pitfall: `found`, `evidence`, `advice`. What cannot be
        measured is NaN, and `settings["missing"]` says why.
    Raises:
        SiteError: a precision that is not known.
        MetricError: a prompt of one token.
        EditError: an edited model.
    Source:
        Xiong et al. 2020 (gradient); Dong et al. 2021 (rank); Zhai et al. 2023 (entropy); Sun et al. 2025, The curse of
        depth (dilution); Sun et al. 2024, Massive activations (outliers); He et al. 2016, Identity mappings
        (activations); Roy and Vetterli 2007 (effective rank).
    """
    asked = [precision] if isinstance(precision, str) else list(precision)
    for each in asked:
        require_known(each, tuple(PRECISIONS), "precision")
    require_unedited(model, "stream_health")
    given = str(model.dtype).removeprefix("torch.")
    missing: dict[str, str] = {}
    base_model = _in_full(model, missing) if given in PRECISIONS else model
    tokens = base_model.tokenize(prompts)
    score = loss().bind(base_model, tokens, torch.empty(0, 0, 0))
    found = passage(base_model, tokens, patterns=_has_patterns(base_model, missing))
    with torch.no_grad():
        check = _check(base_model, tokens, found)
    precisions = list(dict.fromkeys([*asked, *([given] if given in PRECISIONS else [])]))
    drifts = _drifts(base_model, model, tokens, precisions, missing)
    base = Base.of(base_model, tokens)
    if gradients:
        slopes = boundary_gradients(base_model, base, score)
    else:
        slopes, missing["gradient_norm"] = np.full(found.states["norm"].shape, np.nan), "gradients=False"
    worth = layer_worth(base_model, base, progress=progress)
    states = {**found.states, "gradient_norm": slopes}
    data = xr.Dataset(
        {
            **{name: (("prompt", "site"), each) for name, each in states.items()},
            **{name: (("prompt", "write"), each) for name, each in found.writes.items()},
            **{name: (("prompt", "layer", "head"), each) for name, each in found.attention.items()},
            **{name: (("prompt", "site", "top"), each) for name, each in found.outliers.items()},
            **{name: (("precision", "prompt", "site"), each) for name, each in drifts.items()},
            "effect": (("prompt", "layer"), worth.effect),
            "effect_error": ("layer", worth.error),
            "loss": ("prompt", worth.loss),
        },
        coords={
            "site": [str(site) for site in states_of(model)],
            "write": list(model.writes),
            "layer": range(model.n_layers),
            "precision": np.array(precisions, dtype=object),
            "text": ("prompt", texts_of(tokens)),
        },
    )
    about = About(given, found.carries, found.misfits, _guess(tokens), worth.blocks, missing)
    named = [asdict(verdict) for verdict in verdicts(data, about)]
    columns = {name: ("pitfall", [each[name] for each in named]) for name in ("found", "evidence", "advice")}
    data = data.assign(columns).assign_coords(pitfall=[each["pitfall"] for each in named])
    settings = {"dtype": given, "missing": missing, "tokens": int(sum(tokens.lengths)), **carried_of(model)}
    headline = with_carried(_headline(data, missing), model)
    return Result("stream_health", model.name, data, check, headline, settings)


def _in_full(model: ResidualModel, missing: dict[str, str]) -> ResidualModel:
    """The model in float32, if it can be copied, else as it is."""
    try:
        return model.in_dtype(torch.float32)
    except UnsupportedModelError as error:
        missing["float32"] = str(error)
        return model


def _has_patterns(model: ResidualModel, missing: dict[str, str]) -> bool:
    try:
        model.require_inside("pattern")
    except UnsupportedModelError as error:
        missing["entropy"] = missing["first_share"] = str(error)
        return False
    return True


def _drifts(
    full: ResidualModel, given: ResidualModel, tokens: Tokens, precisions: Sequence[str], missing: dict[str, str]
) -> dict[str, np.ndarray]:
    """The drift in each precision; the low copies are made one after another, and freed."""
    shape = (len(precisions), len(tokens), len(states_of(full)))
    trunk, whole = np.full(shape, np.nan), np.full(shape, np.nan)
    if "float32" in missing:
        missing["trunk_drift"] = missing["model_drift"] = missing["float32"]
        return {"trunk_drift": trunk, "model_drift": whole}
    for number, name in enumerate(precisions):
        dtype = PRECISIONS[name]
        drift = precision_drift(full, tokens, dtype, _in_low(full, given, dtype, missing))
        trunk[number], whole[number] = drift.trunk, drift.whole
    return {"trunk_drift": trunk, "model_drift": whole}


def _in_low(
    full: ResidualModel, given: ResidualModel, dtype: torch.dtype, missing: dict[str, str]
) -> ResidualModel | None:
    """The model in a low precision, if it is or can be copied."""
    if given.dtype == dtype:
        return given
    try:
        return full.in_dtype(dtype)
    except UnsupportedModelError as error:
        missing["model_drift"] = str(error)
        return None


def _check(model: ResidualModel, tokens: Tokens, found: Passage) -> Check:
    """Hold the end of the walk against the model's own forward pass."""
    logits = model.readout(at_last(found.final, tokens, range(len(tokens))))
    plain = check_final(model, tokens, logits)
    return Check("embedding + all writes = the model's own logits", plain.error, plain.tolerance)


def _guess(tokens: Tokens) -> float:
    """The entropy of the next tokens, in nats."""
    following = torch.cat([ids[1:length] for ids, length in zip(tokens.ids, tokens.lengths, strict=True)])
    counts = torch.bincount(following).double()
    return float(torch.special.entr(counts / counts.sum()).sum())


def _headline(data: xr.Dataset, missing: dict[str, str]) -> str:
    faults = [str(name) for name in data.pitfall.values[data.found.values]]
    parts = [f"found: {', '.join(faults)}" if faults else f"none of {data.sizes['pitfall']} pitfalls"]
    gone = data.site.values[~np.isfinite(data.norm.sum("prompt", skipna=False).values)]
    if len(gone):
        return "; ".join([*parts, f"the stream overflows at {gone[0]}"])
    times = float((data.first_norm / data.norm).median("prompt").max())
    if times > _SINK:
        share = "" if "entropy" in missing else f" and takes {float(data.first_share.mean()):.0%} of attention"
        parts.append(f"position 0 is a sink (up to {times:.0f} x the norm{share})")
    massive = data.outlier_dimension.values[(data.outlier_size > _MASSIVE) & (data.outlier_times > _TIMES)]
    if massive.size:
        dimensions, counts = np.unique(massive.astype(int), return_counts=True)
        usual = sorted(map(int, dimensions[np.argsort(-counts)][:3]))
        parts.append(f"outliers in dimension{'s' * (len(usual) > 1)} {', '.join(map(str, usual))}")
    return "; ".join(parts)
