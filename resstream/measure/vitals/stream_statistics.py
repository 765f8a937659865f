"""What one pass shows of the stream: sizes, writes, ranks, attention, outliers, and what rounding has cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from resstream.measure.vitals.token_matrix import effective_rank, rank_residual, token_cosine
from resstream.measure.vitals.trunk_carry import Kind, kind_of, without_rounding
from resstream.models.carry import UNCHANGED
from resstream.models.tokens import Tokens
from resstream.models.trunk import ResidualModel
from resstream.stream.walk import Stride, walk

# How many of the largest dimensions are named.
TOP = 3


@dataclass(frozen=True)
class Passage:
    """One pass, in figures; NaN where there is nothing to measure.

    Attributes:
        states: by name, of each state of the stream, "prompt site".
        outliers: by name, of the largest dimensions of each state, "prompt site top".
        writes: by name, of each write, "prompt write".
        attention: by name, of each head, "prompt layer head".
        misfits: the writes that have not the stream's shape, with theirs.
        carries: what the trunk does to the stream itself, each kind once.
        final: what the readout reads.
    """

    states: Mapping[str, Float[np.ndarray, "prompt site"]]
    outliers: Mapping[str, Float[np.ndarray, "prompt site top"]]
    writes: Mapping[str, Float[np.ndarray, "prompt write"]]
    attention: Mapping[str, Float[np.ndarray, "prompt layer head"]]
    misfits: tuple[str, ...]
    carries: tuple[Kind, ...]
    final: Float[Tensor, "prompt pos d_model"]


def passage(model: ResidualModel, tokens: Tokens, *, patterns: bool) -> Passage:
    """Walk up the trunk once, and keep figures of what was there.

    Args:
        model: the model.
        tokens: prompts of two tokens or more.
        patterns: whether attention patterns can be seen.
    Raises:
        UnsupportedModelError: a write that cannot be added to the stream.
    """
    where = counted(model, tokens)
    states, outliers, writes, misfits = [], [], [], []
    attention = [attention_figures(None, tokens, model.n_heads)] * model.n_layers
    kinds: dict[Kind, None] = {}
    with torch.no_grad(), model.running():
        trunk = model.trunk(tokens)
        x, exact = trunk.x0, trunk.x0.double()
        for stride in walk(model, trunk, patterns=patterns):
            states.append(state_figures(stride.x, exact, where))
            outliers.append(_outliers(stride.x, tokens))
            for site, written in stride.written.items():
                if written.shape != x.shape:
                    misfits.append(f"{site} {list(written.shape)}")
                writes.append(write_figures(written.expand_as(x), stride.x, where))
            if stride.pattern is not None:
                attention[stride.sites[0].layer] = attention_figures(stride.pattern, tokens, model.n_heads)
            for part in (stride.carry.before, stride.carry.after):
                kinds |= {} if part is None else {kind_of(part, x): None}
            exact = _exactly(exact, stride)
            x = stride.after
        states.append(state_figures(x, exact, where))
        outliers.append(_outliers(x, tokens))
    return Passage(
        _stacked(states), _stacked(outliers), _stacked(writes), _stacked(attention), tuple(misfits), tuple(kinds), x
    )


def counted(model: ResidualModel, tokens: Tokens) -> list[slice]:
    """The positions of each prompt that figures are taken over: those that predict a next token, and not the first.

    Attention makes the first position a place of its own, to which it turns when it wants nothing. Without attention,
    or without others, it counts.
    """
    attends = any(site.kind == "attn" for step in model.steps for site in step)
    return [slice(1 if attends and length > 2 else 0, length - 1) for length in tokens.lengths]


def state_figures(
    x: Float[Tensor, "prompt pos d_model"], exact: Float[Tensor, "prompt pos d_model"], where: Sequence[slice]
) -> dict[str, list[float]]:
    """What is measured of a state of the stream, prompt by prompt.

    Args:
        x: the state.
        exact: the same writes, added up in float64; NaN where the trunk does more than add.
        where: the positions that count.
    """
    found: dict[str, list[float]] = {}
    for row, places in enumerate(where):
        some = x[row, places].double()
        figures = {
            "norm": float(some.norm(dim=-1).quantile(0.5)),
            "first_norm": float(x[row, 0].double().norm()),
            "variance": float(some.var(dim=-1, unbiased=False).quantile(0.5)),
            "effective_rank": effective_rank(some),
            "rank_residual": rank_residual(some),
            "token_cosine": token_cosine(some),
            "own_drift": relative_error(some, exact[row, places]),
        }
        for name, value in figures.items():
            found.setdefault(name, []).append(value)
    return found


def write_figures(
    written: Float[Tensor, "prompt pos d_model"], x: Float[Tensor, "prompt pos d_model"], where: Sequence[slice]
) -> dict[str, list[float]]:
    """What is measured of a write, as medians over the positions that count.

    `ratio` is its size against the stream that it is added to, `cosine` its direction against that stream's, and
    `one_sided` how far its entries have one sign, |sum| / sum of sizes: 1 where no entry has the other one.
    """
    found: dict[str, list[float]] = {"ratio": [], "cosine": [], "one_sided": []}
    for row, places in enumerate(where):
        own, stream = written[row, places].double(), x[row, places].double()
        size, sizes = own.norm(dim=-1), own.abs().sum(-1)
        found["ratio"].append(float((size / stream.norm(dim=-1)).quantile(0.5)))
        found["cosine"].append(float(torch.nn.functional.cosine_similarity(own, stream, dim=-1).quantile(0.5)))
        found["one_sided"].append(float((own.sum(-1).abs() / sizes).quantile(0.5)))
    return found


def attention_figures(
    pattern: Float[Tensor, "prompt head query key"] | None, tokens: Tokens, n_heads: int
) -> dict[str, list[list[float]]]:
    """What is measured of a layer's heads: the mean over queries but the first.

    `entropy` is of a row of the pattern, as a share of the logarithm of how many keys there were: those up to the query
    itself, or all, where a layer looks ahead. `first_share` is what the first position gets.
    """
    if pattern is None:
        nothing = [[float("nan")] * n_heads] * len(tokens)
        return {"entropy": nothing, "first_share": nothing}
    found: dict[str, list[list[float]]] = {"entropy": [], "first_share": []}
    for row, length in enumerate(tokens.lengths):
        own = pattern[row, :, :length, :length].double()
        ahead = bool(own.triu(1).any())
        keys = torch.full((length - 1,), float(length)) if ahead else torch.arange(2.0, length + 1)
        entropy = torch.special.entr(own[:, 1:]).sum(-1) / keys.double().log().to(own.device)
        found["entropy"].append(entropy.mean(-1).tolist())
        found["first_share"].append(own[:, 1:, 0].mean(-1).tolist())
    return found


def relative_error(found: Float[Tensor, "token d_model"], expected: Float[Tensor, "token d_model"]) -> float:
    """The size of a difference, relative to what is expected; NaN where nothing is.

    >>> relative_error(torch.tensor([[3.0, 4.4]]), torch.tensor([[3.0, 4.0]]))
    0.0800...
    """
    wide = expected.double()
    return float((found.double() - wide).norm() / wide.norm())


def _exactly(exact: Tensor, stride: Stride) -> Tensor:
    """The float64 sum after a step; NaN from where the trunk does more than add and round."""
    if without_rounding(stride.carry, stride.x) != UNCHANGED:
        return torch.full_like(exact, torch.nan)
    return exact + stride.total.double()


def _outliers(x: Tensor, tokens: Tokens) -> dict[str, list[list[float]]]:
    """The dimensions that are largest anywhere in a prompt, their sizes, and how many times the median that is."""
    found: dict[str, list[list[float]]] = {"outlier_dimension": [], "outlier_size": [], "outlier_times": []}
    top = min(TOP, x.shape[-1])
    for row, length in enumerate(tokens.lengths):
        sizes = x[row, :length].double().abs()
        best = sizes.amax(0).topk(top)
        found["outlier_dimension"].append(best.indices.double().tolist())
        found["outlier_size"].append(best.values.tolist())
        found["outlier_times"].append((best.values / sizes.median()).tolist())
    return found


def _stacked(figures: Sequence[Mapping[str, Sequence[object]]]) -> dict[str, np.ndarray]:
    """The figures of each place as arrays, "prompt place ..."."""
    return {name: np.moveaxis(np.array([each[name] for each in figures], float), 0, 1) for name in figures[0]}
