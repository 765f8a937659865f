"""Prompts as the model will see them: token ids, padded on the right, with nothing added, cut or moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from resstream.errors import PromptError

Prompts: TypeAlias = "str | Sequence[str] | Tensor | Mapping[str, Any] | Tokens"
Positions: TypeAlias = "int | Sequence[int] | slice | None"


@dataclass(frozen=True)
class Tokens:
    """A batch of prompts as token ids.

    Attributes:
        ids: token ids, padded on the right with any valid id.
        lengths: number of real tokens of each prompt.
        strings: the text of each real token, for labels.
    """

    ids: Int[Tensor, "prompt pos"]
    lengths: tuple[int, ...]
    strings: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def width(self) -> int:
        """Number of columns: the length of the longest prompt."""
        return int(self.ids.shape[1])

    @property
    def padded(self) -> bool:
        """Whether any prompt is shorter than the longest one."""
        return min(self.lengths) < self.width

    @property
    def mask(self) -> Bool[Tensor, "prompt pos"]:
        """True at real tokens."""
        ends = torch.tensor(self.lengths, device=self.ids.device)
        return torch.arange(self.width, device=self.ids.device)[None] < ends[:, None]

    def take(self, prompts: Sequence[int]) -> Tokens:
        """The batch whose rows are these prompts, in this order, with repeats allowed."""
        return replace(
            self,
            ids=self.ids[list(prompts)],
            lengths=tuple(self.lengths[i] for i in prompts),
            strings=tuple(self.strings[i] for i in prompts),
        )

    def alone(self, prompt: int) -> Tokens:
        """One prompt without padding."""
        only = self.take([prompt])
        return replace(only, ids=only.ids[:, : only.lengths[0]])

    def at(self, positions: Positions) -> Bool[Tensor, "prompt pos"]:
        """True at the chosen positions of every prompt; negative ones count from each prompt's own last token.

        Raises:
            PromptError: a prompt that has no such position.
        """
        if positions is None:
            return self.mask
        chosen = torch.zeros_like(self.mask)
        for row, length in enumerate(self.lengths):
            if isinstance(positions, slice):
                chosen[row, range(length)[positions]] = True
                continue
            for position in [positions] if isinstance(positions, int) else positions:
                if not -length <= position < length:
                    raise PromptError(
                        f"no position {position}: prompt {row} has {length} tokens {list(self.strings[row])}; "
                        f"use {-length} to {length - 1}"
                    )
                chosen[row, position % length] = True
        return chosen


def tokenize(prompts: Prompts, *, tokenizer: Any, vocab_size: int, max_positions: int | None, model: str) -> Tokens:
    """Turn prompts into token ids, exactly as the model's own tokenizer gives them.

    Args:
        prompts: a text, several texts, a tensor of token ids ("prompt pos"), or a mapping with `input_ids` and
            `attention_mask`; padding on either side is found through the mask.
        tokenizer: the model's tokenizer, or None when only token ids will be given.
        vocab_size: number of token ids that the model knows.
        max_positions: longest prompt that the model can read, or None.
        model: name to use in messages.
    Raises:
        PromptError: an empty prompt, one longer than the context, ids out of range, or text without a tokenizer.
    """
    if isinstance(prompts, Tokens):
        return prompts
    if isinstance(prompts, Tensor):
        rows = _rows_of(prompts, None)
    elif isinstance(prompts, Mapping):
        if "input_ids" not in prompts:
            raise PromptError(f"a mapping of tensors needs 'input_ids'; found {sorted(prompts)}")
        rows = _rows_of(prompts["input_ids"], prompts.get("attention_mask"))
    else:
        rows = _rows_of_texts([prompts] if isinstance(prompts, str) else list(prompts), tokenizer, model)
    if not rows:
        raise PromptError("no prompts were given: pass a text, or a list with at least one")
    for number, row in enumerate(rows):
        _require_readable(number, row, vocab_size, max_positions, model)
    width = max(map(len, rows))
    return Tokens(
        # The padding repeats a real token: models may turn pad ids into masks or zero vectors of their own.
        ids=torch.tensor([row + [row[-1]] * (width - len(row)) for row in rows]),
        lengths=tuple(map(len, rows)),
        strings=tuple(tuple(token_string(tokenizer, token) for token in row) for row in rows),
    )


def join(first: Tokens, second: Tokens) -> Tokens:
    """Two batches as one; the shorter rows are padded on."""
    width = max(first.width, second.width)
    rows = [torch.cat([ids, ids[-1:].expand(width - len(ids))]) for tokens in (first, second) for ids in tokens.ids]
    return Tokens(torch.stack(rows), first.lengths + second.lengths, first.strings + second.strings)


def token_string(tokenizer: Any, token: int) -> str:
    """The text of one token; a fragment of a character keeps the tokenizer's own spelling, so that none look alike."""
    if tokenizer is None:
        return str(token)
    text, spelled = str(tokenizer.decode([token])), tokenizer.convert_ids_to_tokens(token)
    if spelled is None:
        return f"<id {token}>"  # models often have more rows than their tokenizer has tokens
    if not text or "\ufffd" in text:
        return str(spelled)
    # Decoders of the SentencePiece kind drop the space before what they take for a text's first word.
    return f" {text}" if str(spelled).startswith("▁") and not text.startswith(" ") else text


def _rows_of_texts(texts: list[str], tokenizer: Any, model: str) -> list[list[int]]:
    for text in texts:
        if not isinstance(text, str):
            raise PromptError(f"a prompt is a text, but found {type(text).__name__}: {text!r}")
    if tokenizer is None:
        raise PromptError(
            f"{model} was loaded without a tokenizer, so it cannot read text; "
            "pass token ids as a tensor, or load it with rs.load(model, tokenizer=...)"
        )
    # One at a time and unpadded, so that a tokenizer's padding side or special pad id can never move a token.
    return [list(tokenizer(text)["input_ids"]) for text in texts]


def _rows_of(ids: Any, mask: Any) -> list[list[int]]:
    if not isinstance(ids, Tensor) or not isinstance(mask, Tensor | None):
        raise PromptError(
            f"token ids and their mask are tensors, but found {type(ids).__name__} and {type(mask).__name__}; "
            'call the tokenizer with return_tensors="pt", and padding=True for several texts'
        )
    if ids.ndim == 1:
        ids, mask = ids[None], None if mask is None else mask[None]
    if ids.ndim != 2 or ids.is_floating_point() or ids.dtype is torch.bool:
        raise PromptError(
            f"token ids are whole numbers of shape [prompt, position]; found {ids.dtype} {list(ids.shape)}"
        )
    if mask is None:
        return [list(map(int, row)) for row in ids]
    if mask.shape != ids.shape:
        raise PromptError(f"attention_mask has shape {list(mask.shape)}, but the token ids have {list(ids.shape)}")
    kept = mask.bool()
    if not torch.equal(kept.to(mask.dtype), mask):
        raise PromptError("attention_mask must be 1 at real tokens and 0 at padding; found other values")
    for number, row in enumerate(kept):
        real = row.nonzero()[:, 0].tolist()
        if real and real[-1] - real[0] >= len(real):
            raise PromptError(f"attention_mask of prompt {number} has a gap; real tokens must stand together")
    return [list(map(int, row[keep])) for row, keep in zip(ids, kept, strict=True)]


def _require_readable(number: int, row: list[int], vocab_size: int, max_positions: int | None, model: str) -> None:
    if not row:
        raise PromptError(f"prompt {number} is empty: {model} needs at least one token")
    if max_positions is not None and len(row) > max_positions:
        raise PromptError(
            f"prompt {number} has {len(row)} tokens, but {model} reads at most {max_positions}; shorten the prompt"
        )
    unknown = [token for token in row if not 0 <= token < vocab_size]
    if unknown:
        raise PromptError(f"prompt {number} holds token id {unknown[0]}, but {model} knows ids 0 to {vocab_size - 1}")
