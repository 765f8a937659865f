"""The text of a prompt: which characters each token stands for, and which tokens a piece of the text takes up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

from resstream.errors import PromptError


@dataclass(frozen=True)
class Text:
    """A prompt's text, and the characters of each token, from start to end; the pieces of one character share it."""

    text: str
    spans: tuple[tuple[int, int], ...]

    def tokens_between(self, start: int, end: int) -> list[int]:
        """The tokens that overlap some characters."""
        return [token for token, (first, stop) in enumerate(self.spans) if first < end and start < stop]


@dataclass(frozen=True)
class Substring:
    """The tokens that overlap a piece of each prompt's text, where that piece occurs more than once.

    >>> import resstream as rs
    >>> tokens = rs.load("smollm2").tokenize("When Mary and John went to the store, John gave a drink to")
    >>> tokens.at(rs.Substring("John", occurrence=1)).nonzero().tolist()
    [[0, 9]]

    Args:
        text: the piece, such as "John" or " Eiffel".
        occurrence: which one, counted from 0; -1 is the last; None requires that there is only one.
    Raises:
        PromptError: an empty piece.
    """

    text: str
    occurrence: int | None = None

    def __post_init__(self) -> None:
        if not self.text:
            raise PromptError("Substring('') stands everywhere; give a piece of the text, such as Substring(' John')")

    def tokens_of(self, text: Text, strings: Sequence[str], prompt: int) -> list[int]:
        """The tokens that the piece takes up.

        Args:
            text: where to look.
            strings: the tokens of the text, for messages.
            prompt: the number of the prompt, for messages.
        Raises:
            PromptError: a piece that is not there, that is there more than once, or that no token stands for.
        """
        starts = [start for start in range(len(text.text)) if text.text.startswith(self.text, start)]
        if not starts:
            raise PromptError(
                f"no {self.text!r} in prompt {prompt}: its tokens are {list(strings)}; {self._hint(text.text)}"
            )
        places = [text.tokens_between(start, start + len(self.text)) for start in starts]
        if self.occurrence is None and len(starts) > 1:
            raise PromptError(
                f"{self.text!r} stands {len(starts)} times in prompt {prompt}, at tokens {places} of {list(strings)}; "
                f"write rs.Substring({self.text!r}, occurrence=0) for the first, and so on, or -1 for the last"
            )
        occurrence = self.occurrence or 0
        if not -len(starts) <= occurrence < len(starts):
            raise PromptError(
                f"no occurrence {occurrence} of {self.text!r} in prompt {prompt}: it stands there {len(starts)} times, "
                f"at tokens {places} of {list(strings)}; use {-len(starts)} to {len(starts) - 1}"
            )
        if not places[occurrence]:
            raise PromptError(
                f"no token of prompt {prompt} stands for {self.text!r}: its tokens are {list(strings)}; "
                "name a piece that has letters"
            )
        return places[occurrence]

    def _hint(self, text: str) -> str:
        """What was probably meant: the same without its spaces, or in other letters."""
        bare = self.text.strip()
        at = text.lower().find(bare.lower()) if bare else -1
        near = text[at : at + len(bare)]
        return f"did you mean {near!r}?" if at >= 0 else 'name a piece of its text, a number, or "last"'


def text_readers(
    rows: Sequence[Sequence[int]], texts: Sequence[str] | None, tokenizer: Any
) -> tuple[Callable[[], Text], ...]:
    """What finds the text of each prompt once it is needed.

    Args:
        rows: the token ids of each prompt.
        texts: the prompts as they were given, or None where they were given as token ids.
        tokenizer: the model's own, or None, without which token ids have no text.
    """
    if tokenizer is None:
        return ()
    if texts is not None and getattr(tokenizer, "is_fast", False):
        return tuple(partial(_by_offsets, tokenizer, text) for text in texts)
    return tuple(partial(_by_decoding, tokenizer, list(row)) for row in rows)


def _by_offsets(tokenizer: Any, text: str) -> Text:
    """The text as it was given, with the tokenizer's own offsets."""
    offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    return Text(text, tuple((int(start), int(end)) for start, end in offsets))


def _by_decoding(tokenizer: Any, row: Sequence[int]) -> Text:
    """Spans from how the decoded text grows: as long as a character lacks bytes, its place holds another one."""
    whole, done, spans = str(tokenizer.decode(row)), 0, []
    for count in range(1, len(row) + 1):
        part = str(tokenizer.decode(row[:count]))
        same = _shared_start(part, whole)
        end = same + (len(part) > same)
        spans.append((min(done, max(end - 1, 0)), end))
        done = same
    return Text(whole, tuple(spans))


def _shared_start(one: str, other: str) -> int:
    """How many characters two texts have in common from their start."""
    alike = (a == b for a, b in zip(one, other, strict=False))
    return sum(takewhile(bool, alike))
