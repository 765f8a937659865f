"""The labels that measures share: prompts and tokens as coordinates, arguments as plain settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from resstream.models.tokens import Tokens
from resstream.models.trunk import ResidualModel


def prompt_coords(tokens: Tokens, name: str = "token") -> dict[str, Any]:
    """Coordinates of a batch: positions, token strings (never an index, since they repeat), and lengths."""
    strings = np.full((len(tokens), tokens.width), "", dtype=object)
    for row, texts in enumerate(tokens.strings):
        strings[row, : len(texts)] = texts
    return {
        "prompt": np.arange(len(tokens)),
        "position": np.arange(tokens.width),
        name: (("prompt", "position"), strings),
        "length": ("prompt", np.array(tokens.lengths)),
    }


def texts_of(tokens: Tokens) -> list[str]:
    """Each prompt as text, put together from its own tokens."""
    return ["".join(row[:own]) for row, own in zip(tokens.strings, tokens.own_lengths, strict=True)]


def names_of(asked: Any) -> Any:
    """A choice of sites, layers or positions as a plain value that a file can hold."""
    if isinstance(asked, (str, int)):
        return asked
    return [names_of(each) for each in asked] if isinstance(asked, Iterable) else str(asked)


def carried_of(model: ResidualModel) -> dict[str, str]:
    """What settings say about a trunk that changes the stream itself; nothing of one that does not."""
    count = len(model.carried)
    return {"trunk": f"trunk factors carried at {count} of {len(model.steps)} steps"} if count else {}


def with_carried(headline: str, model: ResidualModel) -> str:
    """A headline, and what there is to say of a trunk that changes the stream itself."""
    return "; ".join([headline, *carried_of(model).values()])


def to_numpy(values: Tensor) -> np.ndarray:
    """A tensor as a float64 array of its own."""
    return values.detach().double().cpu().numpy()
