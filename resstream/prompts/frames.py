"""Frames: a text with slots, the words that may stand in them, and what stands there in the corrupted prompt."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from resstream.errors import PromptError, listed

Filler: TypeAlias = str | Mapping[str, str]
Fillers: TypeAlias = Mapping[str, Sequence[Filler] | str]

_SLOT = re.compile(r"\{(\w+)(?:\.(\w+))?\}")


@dataclass(frozen=True)
class Filled:
    """A text whose slots are filled, and where each slot's words stand in it, from one character to another."""

    text: str
    slots: Mapping[str, tuple[tuple[int, int], ...]]


@dataclass(frozen=True)
class Frame:
    """A text with slots.

    Attributes:
        text: the clean prompt, with slots such as {name}, or {country.capital} for a filler that has several forms.
        fillers: for each slot its words, or the name of the slot whose word it repeats.
        corrupt: for a slot, as it is written in the text, what is written there in the corrupted prompt.
        answer, against: what follows the clean prompt, and what follows the corrupted one, with slots of their own.
    """

    text: str
    fillers: Fillers
    corrupt: Mapping[str, str]
    answer: str
    against: str

    def __post_init__(self) -> None:
        unused = [slot for slot in self.corrupt if f"{{{slot}}}" not in self.text]
        if unused or not self.corrupt:
            raise PromptError(
                f"nothing to corrupt: {self.text!r} has no slot {listed(unused)}; "
                f"name one of {listed(_spelled(self.text))}, as it is written there"
            )
        for slot in self._spelled_anywhere:
            self._require_fillers(*_parts(slot))

    def source(self, slot: str) -> str:
        """The slot that a slot's word is chosen for: itself, or the one that it repeats."""
        filler = self.fillers[slot]
        return filler if isinstance(filler, str) else slot

    def fillers_of(self, slot: str) -> Sequence[Filler]:
        """The words that may be chosen for a slot."""
        fillers = self.fillers[self.source(slot)]
        return () if isinstance(fillers, str) else fillers

    @cached_property
    def shown(self) -> tuple[str, ...]:
        """The slots that words are chosen for in the clean prompt."""
        return self._sources(_spelled(self.text))

    @cached_property
    def hidden(self) -> tuple[str, ...]:
        """The others, which only the corrupted prompt or the answers have."""
        return tuple(slot for slot in self._sources(self._spelled_anywhere) if slot not in self.shown)

    def size(self, slots: Sequence[str]) -> int:
        """In how many ways some slots can be filled, those with a word twice included."""
        return math.prod(len(self.fillers_of(slot)) for slot in slots)

    def choice(self, slots: Sequence[str], number: int) -> dict[str, Filler]:
        """One of the ways to fill some slots, by its number."""
        chosen = {}
        for slot in slots:
            number, place = divmod(number, len(self.fillers_of(slot)))
            chosen[slot] = self.fillers_of(slot)[place]
        return chosen

    def clean(self, words: Mapping[str, Filler]) -> Filled:
        """The clean prompt."""
        return self._fill(self.text, words, {})

    def corrupted(self, words: Mapping[str, Filler]) -> Filled:
        """The corrupted prompt; its slots have the names that they have in the clean one."""
        return self._fill(self.text, words, self.corrupt)

    def answers(self, words: Mapping[str, Filler]) -> tuple[str, str]:
        """What follows the clean prompt, and what follows the corrupted one."""
        return self._fill(self.answer, words, {}).text, self._fill(self.against, words, {}).text

    def _fill(self, text: str, words: Mapping[str, Filler], instead: Mapping[str, str]) -> Filled:
        done, end = "", 0
        slots: dict[str, tuple[tuple[int, int], ...]] = {}
        for match in _SLOT.finditer(text):
            done += text[end : match.start()]
            written = match[0][1:-1]
            word = self._word(words, *_parts(instead.get(written, written)))
            slots[match[1]] = (*slots.get(match[1], ()), (len(done), len(done) + len(word)))
            done, end = done + word, match.end()
        return Filled(done + text[end:], slots)

    def _word(self, words: Mapping[str, Filler], slot: str, form: str) -> str:
        filler = words[self.source(slot)]
        return filler if isinstance(filler, str) else filler[form]

    def _sources(self, spelled: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.source(_parts(slot)[0]) for slot in spelled))

    @property
    def _spelled_anywhere(self) -> list[str]:
        texts = (self.text, self.answer, self.against)
        return [*self.corrupt.values(), *(slot for text in texts for slot in _spelled(text))]

    def _require_fillers(self, slot: str, form: str) -> None:
        """Refuse a slot without words, and words without the form that is written."""
        if slot not in self.fillers:
            raise PromptError(
                f"no words for the slot {{{slot}}} of {self.text!r}: there are some for {listed(self.fillers)}; "
                f"write fillers={{{slot!r}: [...], ...}}"
            )
        if self.source(slot) not in self.fillers or isinstance(self.fillers[self.source(slot)], str):
            raise PromptError(
                f"the slot {{{slot}}} repeats {self.source(slot)!r}, which has no words of its own; "
                f"write fillers={{{slot!r}: [...]}}, with a list, or the name of a slot that has one"
            )
        words = self.fillers_of(slot)
        wrong = [each for each in words if (bool(form) if isinstance(each, str) else form not in each)]
        if wrong or not words:
            written = f"{slot}.{form}" if form else slot
            raise PromptError(
                f"the slot {{{written}}} cannot be filled with {wrong[0] if wrong else words!r}; give at least one "
                'word to a slot without a dot, and mappings such as {"form": "word"} to {slot.form}'
            )


def spread(frames: Sequence[Frame], numbers: Iterator[int]) -> Iterator[tuple[Frame, dict[str, Filler]]]:
    """Numbers below the sum of the frames' sizes, as ways to fill the clean prompt of one of them."""
    sizes = [frame.size(frame.shown) for frame in frames]
    for number in numbers:
        which = 0
        while number >= sizes[which]:
            number, which = number - sizes[which], which + 1
        yield frames[which], frames[which].choice(frames[which].shown, number)


def _spelled(text: str) -> list[str]:
    """The slots of a text as they are written."""
    return [match[0][1:-1] for match in _SLOT.finditer(text)]


def _parts(spelled: str) -> tuple[str, str]:
    slot, _, form = spelled.partition(".")
    return slot, form
