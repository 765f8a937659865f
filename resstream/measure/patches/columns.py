"""Columns: choices of positions, each of which is patched on its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from resstream.errors import PromptError
from resstream.measure.labels import prompt_coords
from resstream.measure.patches.pairs import Pairs
from resstream.models.tokens import PerPrompt, Tokens


@dataclass(frozen=True)
class _Each:
    """One column of positions="each"."""

    index: int


@dataclass(frozen=True)
class Columns:
    """Choices of positions.

    Attributes:
        choices: selectors as `Tokens.at` takes them, or numbers of "each"; a single None stands for all at once.
    """

    choices: tuple[Any, ...]

    @classmethod
    def of(cls, tokens: Tokens, positions: Any) -> Columns:
        """Read what a user asks for, and check it against the prompts.

        Raises:
            PromptError: no such position.
        """
        if isinstance(positions, str) and positions in ("all", "each"):
            return cls((None,) if positions == "all" else tuple(_Each(index) for index in range(tokens.width)))
        asked = list(positions) if isinstance(positions, (list, tuple)) else [positions]
        if not asked:
            raise PromptError('no positions to patch; write positions="each", "all" or a list such as [-1]')
        choices = [choice for number, choice in enumerate(asked) if choice not in asked[:number]]
        for choice in choices:
            tokens.at(choice)
        return cls(tuple(choices))

    def __len__(self) -> int:
        return len(self.choices)

    @property
    def together(self) -> bool:
        """Whether all positions are patched at once, so that results have no axis of them."""
        return self.choices == (None,)

    def take(self, prompts: Sequence[int]) -> Columns:
        """The same choices for some of the prompts, in this order."""
        some = [
            replace(choice, positions=tuple(choice.positions[prompt] for prompt in prompts))
            if isinstance(choice, PerPrompt)
            else choice
            for choice in self.choices
        ]
        return Columns(tuple(some))

    def masks(self, tokens: Tokens) -> Bool[Tensor, "column prompt pos"]:
        """Which positions of each prompt each choice means."""
        everywhere = torch.arange(tokens.width, device=tokens.ids.device)
        masks = [
            tokens.mask & (everywhere == choice.index) if isinstance(choice, _Each) else tokens.at(choice)
            for choice in self.choices
        ]
        return torch.stack(masks)

    def coords(self, pairs: Pairs) -> dict[str, Any]:
        """Labels of the positions, and the tokens that stand there in both runs; found in the clean prompts."""
        clean, corrupted = prompt_coords(pairs.clean), prompt_coords(pairs.corrupted)
        if self.together:
            return {}
        if isinstance(self.choices[0], _Each):
            return {"position": clean["position"], "token": clean["token"], "corrupted_token": corrupted["token"]}
        names = [_name_of(choice) for choice in self.choices]
        numbers = all(isinstance(name, int) for name in names)
        masks = self.masks(pairs.clean)
        tokens = {"token": pairs.clean.strings, "corrupted_token": pairs.corrupted.strings}
        return {
            "position": names if numbers else list(map(str, names)),
            **{name: (("prompt", "position"), _spelled(masks, strings)) for name, strings in tokens.items()},
        }


def _name_of(choice: Any) -> int | str:
    if isinstance(choice, int):
        return choice
    if isinstance(choice, PerPrompt):
        return "by prompt"
    return choice if isinstance(choice, str) else str(choice)


def _spelled(masks: Bool[Tensor, "column prompt pos"], strings: Sequence[Sequence[str]]) -> list[list[str]]:
    """For each prompt, the text at each choice of positions."""
    return [
        ["".join(own[place] for place in mask[row].nonzero()[:, 0].tolist()) for mask in masks]
        for row, own in enumerate(strings)
    ]
