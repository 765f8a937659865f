"""How far the stream drifts in a low precision: by its additions alone, and in a model that runs in it throughout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from resstream.measure.vitals.stream_statistics import counted, relative_error
from resstream.measure.vitals.trunk_carry import without_rounding
from resstream.models.tokens import Tokens
from resstream.models.trunk import ResidualModel
from resstream.stream.walk import walk

PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Drift:
    """How far each state is from the same state in full precision, relative, over the positions that count.

    Attributes:
        trunk: where only the stream is in the low precision: full-precision writes, rounded and added there.
        whole: where the whole model is; NaN without such a model.
    """

    trunk: Float[np.ndarray, "prompt site"]
    whole: Float[np.ndarray, "prompt site"]


def precision_drift(model: ResidualModel, tokens: Tokens, dtype: torch.dtype, low: ResidualModel | None) -> Drift:
    """Let a stream run in two precisions at once, and compare them state by state.

    Args:
        model: the model in full precision.
        tokens: the prompts.
        dtype: the low precision.
        low: the same model in it, or None.
    """
    with torch.no_grad():
        pairs = list(_errors(model, tokens, dtype, low))
    trunk, whole = (np.array(each).T for each in zip(*pairs, strict=True))
    return Drift(trunk, whole)


def _errors(
    model: ResidualModel, tokens: Tokens, dtype: torch.dtype, low: ResidualModel | None
) -> Iterator[tuple[list[float], list[float]]]:
    where = counted(model, tokens)
    trunk = model.trunk(tokens)
    lower: Iterator[Tensor | None] = repeat(None) if low is None else _states(low, tokens)
    x, rounded = trunk.x0, trunk.x0.to(dtype)
    yield _apart(rounded, x, where), _apart(next(lower), x, where)
    for stride, below in zip(walk(model, trunk), lower, strict=False):
        carry = without_rounding(stride.carry, x)
        x = carry.add(x, stride.total)
        # What the stream itself goes through is computed in full precision, and then rounded like a sum.
        rounded = carry.add(rounded.to(x), stride.total.to(dtype).to(x)).to(dtype)
        yield _apart(rounded, x, where), _apart(below, x, where)


def _states(model: ResidualModel, tokens: Tokens) -> Iterator[Tensor]:
    trunk = model.trunk(tokens)
    yield trunk.x0
    for stride in walk(model, trunk):
        yield stride.after


def _apart(found: Tensor | None, expected: Tensor, where: Sequence[slice]) -> list[float]:
    if found is None:
        return [float("nan")] * len(where)
    return [relative_error(found[row, places], expected[row, places]) for row, places in enumerate(where)]
