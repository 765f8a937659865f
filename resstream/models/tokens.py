"""Prompts as the model will see them: token ids, padded on the right, with nothing added, cut or moved."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from resstream.errors import PromptError
from resstream.models.text import Substring, Text, text_readers

Prompts: TypeAlias = "str | Sequence[str] | Tensor | Mapping[str, Any] | Tokens"


@dataclass(frozen=True)
class PerPrompt:
    """Positions that differ from prompt to prompt.

    >>> import resstream as rs
    >>> tokens = rs.load("smollm2").tokenize(["The cat sat", "A dog"])
    >>> tokens.at(rs.PerPrompt(((0, 2), (1,)))).tolist()
    [[True, False, True], [False, True, False]]

    Args:
        positions: the positions of each prompt, in the order of the prompts; negative ones count from its end.
    """

    positions: tuple[tuple[int, ...], ...]


Place: TypeAlias = int | str | Substring
Positions: TypeAlias = Place | Sequence[Place] | slice | PerPrompt | None


@dataclass(frozen=True)
class Tokens:
    """A batch of prompts as token ids.

    Attributes:
        ids: token ids, padded on the right with any valid id.
        lengths: number of real tokens of each prompt.
        strings: the text of each real token, for labels.
        forced: how many of each prompt's real tokens, at its end, are an answer that it is made to give; () for none.
        texts: what finds each prompt's own text and spans when a piece of it is looked for; () where there is no text.
    """

    ids: Int[Tensor, "prompt pos"]
    lengths: tuple[int, ...]
    strings: tuple[tuple[str, ...], ...]
    forced: tuple[int, ...] = ()
    texts: tuple[Callable[[], Text], ...] = field(default=(), repr=False)

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

    @property
    def own_lengths(self) -> tuple[int, ...]:
        """Number of each prompt's own tokens, which are all but the forced ones."""
        forced = self.forced or (0,) * len(self)
        return tuple(length - extra for length, extra in zip(self.lengths, forced, strict=True))

    @property
    def last(self) -> tuple[int, ...]:
        """The position of each prompt's own last token, from which its answer is predicted."""
        return tuple(length - 1 for length in self.own_lengths)

    def take(self, prompts: Sequence[int]) -> Tokens:
        """The batch whose rows are these prompts, in this order, with repeats allowed."""
        return replace(
            self,
            ids=self.ids[list(prompts)],
            lengths=tuple(self.lengths[i] for i in prompts),
            strings=tuple(self.strings[i] for i in prompts),
            forced=tuple(self.forced[i] for i in prompts) if self.forced else (),
            texts=tuple(self.texts[i] for i in prompts) if self.texts else (),
        )

    def alone(self, prompt: int) -> Tokens:
        """One prompt without padding."""
        return self.take([prompt]).narrow()

    def narrow(self) -> Tokens:
        """The same prompts in as few columns as the longest of them needs."""
        return replace(self, ids=self.ids[:, : max(self.lengths)])

    def at(self, positions: Positions) -> Bool[Tensor, "prompt pos"]:
        """True at the chosen positions of every prompt, counted among its own tokens.

        Args:
            positions: numbers, negative ones from each prompt's own last token; a slice; "last"; any other text, for
                the tokens that overlap it (a `Substring` says which occurrence); several of these; a `PerPrompt`; or
                None for every real token, forced ones included.
        Raises:
            PromptError: a position or a text that a prompt does not have, or a text that it has twice.
        """
        if positions is None:
            return self.mask
        if isinstance(positions, PerPrompt) and len(positions.positions) != len(self):
            raise PromptError(
                f"positions for {len(positions.positions)} prompts, but there are {len(self)}; give some for each one"
            )
        chosen = torch.zeros_like(self.mask)
        for row in range(len(self)):
            here = positions.positions[row] if isinstance(positions, PerPrompt) else positions
            chosen[row, self._columns(row, here)] = True
        return chosen

    def _columns(self, row: int, positions: Place | Sequence[Place] | slice) -> list[int]:
        if isinstance(positions, (int, Integral)):
            return [self._column(row, int(positions))]
        if isinstance(positions, slice):
            return list(range(self.own_lengths[row])[positions])
        if isinstance(positions, str):
            return [self.last[row]] if positions == "last" else self._overlapping(row, Substring(positions))
        if isinstance(positions, Substring):
            return self._overlapping(row, positions)
        return [column for place in positions for column in self._columns(row, place)]

    def _column(self, row: int, position: int) -> int:
        length = self.own_lengths[row]
        if not -length <= position < length:
            raise PromptError(
                f"no position {position}: prompt {row} has {length} tokens {list(self.strings[row][:length])}; "
                f"use {-length} to {length - 1}"
            )
        return position % length

    def _overlapping(self, row: int, piece: Substring) -> list[int]:
        if not self.texts:
            raise PromptError(
                f"cannot look for {piece.text!r} in prompt {row}: token ids without a tokenizer have no text; "
                'give positions as numbers, or "last"'
            )
        return piece.tokens_of(self.texts[row](), self.strings[row][: self.own_lengths[row]], row)


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
        rows, texts = _rows_of(prompts, None), None
    elif isinstance(prompts, Mapping):
        if "input_ids" not in prompts:
            raise PromptError(f"a mapping of tensors needs 'input_ids'; found {sorted(prompts)}")
        rows, texts = _rows_of(prompts["input_ids"], prompts.get("attention_mask")), None
    else:
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        rows = _rows_of_texts(texts, tokenizer, model)
    if not rows:
        raise PromptError("no prompts were given: pass a text, or a list with at least one")
    for number, row in enumerate(rows):
        _require_readable(number, row, vocab_size, max_positions, model)
    return Tokens(
        ids=_padded(rows),
        lengths=tuple(map(len, rows)),
        strings=tuple(tuple(token_string(tokenizer, token) for token in row) for row in rows),
        texts=text_readers(rows, texts, tokenizer),
    )


def join(first: Tokens, second: Tokens) -> Tokens:
    """Two batches as one; the shorter rows are padded on."""
    width = max(first.width, second.width)
    rows = [torch.cat([ids, ids[-1:].expand(width - len(ids))]) for tokens in (first, second) for ids in tokens.ids]
    lengths, own = first.lengths + second.lengths, first.own_lengths + second.own_lengths
    return Tokens(
        torch.stack(rows),
        lengths,
        first.strings + second.strings,
        forced=tuple(all_ - its for all_, its in zip(lengths, own, strict=True)) if lengths != own else (),
        texts=first.texts + second.texts if first.texts and second.texts else (),
    )


def force(tokens: Tokens, answers: Sequence[Sequence[int]], *, tokenizer: Any, max_positions: int | None) -> Tokens:
    """Each prompt with the tokens of an answer after it, which it is made to give.

    Args:
        tokens: prompts that are not followed by an answer yet.
        answers: token ids to stand after each prompt.
        tokenizer: the model's tokenizer, for labels.
        max_positions: longest prompt that the model can read, or None.
    Raises:
        PromptError: a prompt that has an answer already, or that is too long with it.
    """
    if any(tokens.forced):
        raise PromptError("these prompts are followed by an answer already; give the prompts alone")
    rows = [[*ids[:n].tolist(), *more] for ids, n, more in zip(tokens.ids, tokens.lengths, answers, strict=True)]
    for number, (row, more) in enumerate(zip(rows, answers, strict=True)):
        if max_positions is not None and len(row) > max_positions:
            raise PromptError(
                f"prompt {number} has {len(row)} tokens, the {len(more)} of its answer that are run included, but the "
                f"model reads at most {max_positions}; shorten the prompt"
            )
    spelled = [tuple(token_string(tokenizer, token) for token in more) for more in answers]
    return replace(
        tokens,
        ids=_padded(rows).to(tokens.ids.device),
        lengths=tuple(map(len, rows)),
        strings=tuple(own + more for own, more in zip(tokens.strings, spelled, strict=True)),
        forced=tuple(map(len, answers)),
    )


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
    for number, text in enumerate(texts):
        if text.endswith(" "):
            warnings.warn(
                f"prompt {number} ends in a space, {text[-20:]!r}: most tokenizers put the space before a word into "
                "that word's token, so the model is asked for something else than the next word; drop the space",
                stacklevel=2,
            )
    # One at a time and unpadded, so that a tokenizer's padding side or special pad id can never move a token.
    return [list(tokenizer(text)["input_ids"]) for text in texts]


def _padded(rows: Sequence[Sequence[int]]) -> Int[Tensor, "prompt pos"]:
    """Rows of equal length; the padding repeats a real token, as models may turn pad ids into masks of their own."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[row[-1]] * (width - len(row))] for row in rows])


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
