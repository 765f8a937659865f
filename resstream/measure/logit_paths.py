"""Forward paths: a logit as a sum over what travels from the embedding and from each branch, by length of path."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad
from tqdm import tqdm

from resstream.check import Check
from resstream.errors import MetricError, listed
from resstream.measure.answers import Answer, answer_ids, require_different
from resstream.measure.labels import carried_of, texts_of, to_numpy
from resstream.models.tokens import Prompts, Tokens
from resstream.models.trunk import ResidualModel
from resstream.result import Result
from resstream.sites import WRITES, Site
from resstream.stream.edited import require_unedited
from resstream.stream.pull import Part, gradient, pull
from resstream.stream.read import trace

Gauge: TypeAlias = Literal["frozen", "jacobian", "direct"]

MEANING = {
    "direct": "branches add what they add: direct logit attribution, frozen final norm",
    "frozen": "norm scales, attention patterns and gates held fixed",
    "jacobian": "each branch's derivative at its input; what is left of its value is its own",
}


def logit_by_path_length(
    model: ResidualModel,
    prompts: Prompts,
    answer: Answer,
    against: Answer | None = None,
    *,
    gauge: Gauge = "frozen",
    progress: bool = False,
) -> Result:
    """Split a logit, or the difference of two, exactly into terms by the number of branches that they passed through.

    >>> import resstream as rs
    >>> model = rs.load("smollm2")
    >>> prompt = "When Mary and John went to the store, John gave a drink to"
    >>> r = rs.logit_by_path_length(model, prompt, " Mary", " John", gauge="direct")
    >>> (r.data.term.sum() + r.data.constant.sum()).round(2).item(), r.check.passed
    (6.12, True)

    For any linear map A_i in the place of branch F_i, the branch is A_i x and a remainder b_i = F_i(x) - A_i x. So the
    last residual is a sum over paths through the A_i, from the embedding and from each b_i, which counts as one hop
    itself. That adds up whatever the A_i are: the sum proves the arithmetic, and the choice, the gauge, is yours.

    Where the model changes the stream itself, as a scaled skip or a norm on the trunk does, paths carry the factors of
    that, too. What its linear map does not account for begins on the trunk, a source of its own that counts as no hop.

    Args:
        model: a model from `load`.
        prompts: a text, several texts, or token ids; each is expanded on its own.
        answer: the token whose logit is split, as text or id; a list gives each prompt its own.
        against: a token whose logit is subtracted, likewise.
        gauge: "direct", A = 0: direct logit attribution. "frozen": norm scales, attention patterns and gates are held
            fixed, so that biases are all that remains. "jacobian": A = J; branches behind a norm do not change with
            the scale of what they read, so J x is near 0 and nearly everything lands in the remainders.
        progress: whether to show a progress bar.
    Returns:
        Result over (prompt, path_length): `term`, in logits; over (prompt, source, path_length): `term_from`, the same
        by where the paths begin, "embed", a write, or the "trunk" of a model that changes the stream itself; and over
        prompts: `constant`, what the final norm and head add themselves, `logit`, the sum of it all, and `kappa`, sum
        of |term| over |logit|: how much cancels.
    Raises:
        MetricError: an answer of several tokens, or two that are the same.
        UnsupportedModelError: a branch that does not become linear when frozen.
    Source:
        Elhage et al. 2021, A Mathematical Framework for Transformer Circuits, for end-to-end paths.
    """
    if gauge not in MEANING:
        raise MetricError(f'gauge="{gauge}" is not known; choose from {listed(MEANING)}')
    require_unedited(model, "logit_by_path_length")
    tokens = model.tokenize(prompts)
    right = answer_ids(model, answer, len(tokens))
    wrong = None if against is None else answer_ids(model, against, len(tokens))
    if wrong is not None:
        require_different(model, right, wrong)
    wide = model.in_float64()
    tables = []
    for prompt in tqdm(range(len(tokens)), desc="forward paths", disable=not progress):
        ids = [right[prompt]] if wrong is None else [right[prompt], wrong[prompt]]
        tables.append(_expand(wide, tokens.alone(prompt), ids, gauge))
    data = xr.Dataset(
        {
            "term": (("prompt", "path_length"), np.array([table["terms"].sum(0) for table in tables])),
            "term_from": (("prompt", "source", "path_length"), np.array([table["terms"] for table in tables])),
            "constant": ("prompt", [table["constant"] for table in tables]),
            "logit": ("prompt", [table["logit"] for table in tables]),
            "kappa": ("prompt", [abs(table["terms"].sum(0)).sum() / abs(table["logit"]) for table in tables]),
        },
        coords={"source": _sources(model), "text": ("prompt", texts_of(tokens))},
    )
    data = data.assign_coords(prompt=np.arange(len(tokens)), path_length=np.arange(data.sizes["path_length"]))
    name = f"logit of {answer!r}" if against is None else f"logit of {answer!r} - {against!r}"
    settings = {"gauge": gauge, "meaning": MEANING[gauge], "metric": name, "units": "logits", **carried_of(model)}
    error = max(table["error"] for table in tables)
    check = Check("sum of all terms = the model's logit", error, 1e-8)
    return Result("logit_by_path_length", model.name, data, check, _headline(data, settings), settings)


def _expand(wide: ResidualModel, alone: Tokens, ids: Sequence[int], gauge: Gauge) -> dict[str, Any]:
    """All terms of one prompt, by where they begin and how many hops they make."""
    with torch.no_grad():
        trunk = wide.trunk(alone)
        reads = [step[0] for step in wide.steps]
        middle = "resid_mid" if wide.layout == "sequential" else "resid_pre"
        states = [Site(site.layer, "resid_pre" if site.kind == "attn" else middle) for site in reads]
        values, final = trace(wide, trunk, states)
        own = _difference(wide.own_logits(alone)[:, -1, list(ids)])
    head = partial(_head, wide, ids, gauge)
    slope = gradient(head, final)
    value = float(head(final).detach())
    split = slope[None]
    place = {source: number for number, source in enumerate(_sources(wide))}
    terms = np.zeros((len(place), 1 + len(wide.steps)))
    linear = partial(_linear, wide, gauge)
    for step, state in zip(reversed(wide.steps), reversed(states), strict=True):
        x, carry = values[state], wide.carry(step)
        if carry.after is not None:
            with torch.no_grad():
                total = carry.passing(x) + torch.stack([trunk.write(site, x) for site in step]).sum(0)
            split, remainder = linear("trunk", carry.after, total, split)
            terms[place["trunk"], : len(split)] += remainder
        hops = torch.zeros_like(split)
        for site in step:
            pulled, remainder = linear(site.kind, partial(trunk.write, site), x, split)
            # What the linear map does not account for starts here, and counts as one hop.
            terms[place[str(site)], 1 : 1 + len(split)] = remainder
            hops = hops + pulled
        if carry.before is not None:
            split, remainder = linear("trunk", carry.before, x, split)
            terms[place["trunk"], : len(split)] += remainder
        split = pad(split, (0, 0, 0, 0, 0, 1)) + pad(hops, (0, 0, 0, 0, 1, 0))
    terms[0] = to_numpy((split * trunk.x0).sum((1, 2)))
    constant = value - float((slope * final).sum())
    logit = float(own)
    error = abs(float(terms.sum()) + constant - logit) / max(abs(logit), 1e-30)
    return {"terms": terms, "constant": constant, "logit": logit, "error": error}


def _linear(
    wide: ResidualModel, gauge: Gauge, part: str, function: Part, x: Tensor, vectors: Tensor
) -> tuple[Float[Tensor, "vector pos d_model"], Float[np.ndarray, " vector"]]:
    """Vectors pulled back through a part's linear map, and their products with what of its value that leaves out."""
    with torch.no_grad():
        value = function(x)

    def held(stream: Tensor) -> Tensor:
        with _held(wide, part, gauge):
            return function(stream)

    absent = gauge == "direct" and part in WRITES
    pulled = torch.zeros_like(vectors) if absent else pull(held, x, vectors)
    return pulled, to_numpy((vectors * value).sum((1, 2)) - (pulled * x).sum((1, 2)))


def _sources(model: ResidualModel) -> list[str]:
    """Where paths begin."""
    return ["embed", *model.writes, *(["trunk"] if model.carried else [])]


def _head(wide: ResidualModel, ids: Sequence[int], gauge: Gauge, final: Tensor) -> Tensor:
    """The logit, or the difference of two, as a function of the last residuals; linear but for the Jacobian gauge."""
    with _held(wide, "readout", gauge):
        return _difference(wide.readout(final[:, -1], ids))


def _held(wide: ResidualModel, part: Any, gauge: Gauge) -> AbstractContextManager[None]:
    return nullcontext() if gauge == "jacobian" else wide.frozen(part)


def _difference(logits: Float[Tensor, "1 answer"]) -> Float[Tensor, ""]:
    return logits[0, 0] - logits[0, 1:].sum()


def _headline(data: xr.Dataset, settings: dict[str, Any]) -> str:
    first = data.isel(prompt=0)
    peak = int(np.abs(first.term.values).argmax())
    return (
        f"{settings['metric']} = {float(first.logit):.3f} in the gauge {settings['gauge']}; "
        f"largest term {float(first.term[peak]):+.3g} at length {peak}, constant {float(first.constant):+.3g}"
        + (f"; {settings['trunk']}" if "trunk" in settings else "")
    )
