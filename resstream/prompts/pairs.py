"""Pairs: clean and corrupted prompts that match token by token, and the answers that they ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from resstream.errors import PromptError, listed
from resstream.measure.metrics import logit_diff
from resstream.models.tokens import PerPrompt, Tokens

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Pairs:
    """Clean and corrupted prompts in pairs, with the answer to each and what it is compared with.

    >>> import resstream as rs
    >>> pairs = rs.prompts.facts(rs.load("smollm2"), relation="capital", count=4, seed=0)
    >>> len(pairs), len(pairs[1:3]), pairs.metric.units
    (4, 2, 'logits')
    >>> pairs[0]
    Pairs(capital of smollm2: 1 pair)
      clean      The government of Finland has its seat in the capital city of
      corrupted  The government of Chile has its seat in the capital city of
      answer     ' Helsinki', against ' Santiago'

    The two prompts of a pair have as many tokens, and each slot stands at the same positions in both; another pair may
    be longer. Where pairs are cut, `pairs[3]`, `pairs[:8]` and `pairs[[0, 5]]` are pairs again.

    Attributes:
        name: what the pairs are about.
        model: the name of the model whose tokenizer they fit.
        clean: prompts after which `answers` are right: texts, or Tokens where they are no text.
        corrupted: their partners.
        answers: the next token of each clean prompt: as text, or as an id where the text alone is another token.
        against: what each answer is compared with, likewise.
        slots: for each pair, the positions of the words that stand in each slot of its template.
    """

    name: str
    model: str
    clean: tuple[str, ...] | Tokens
    corrupted: tuple[str, ...] | Tokens
    answers: tuple[str | int, ...]
    against: tuple[str | int, ...]
    slots: tuple[Mapping[str, tuple[int, ...]], ...]

    def __len__(self) -> int:
        return len(self.answers)

    def __getitem__(self, chosen: int | slice | Sequence[int]) -> Pairs:
        """Some of the pairs.

        Raises:
            IndexError: a pair that there is not.
        """
        every = range(len(self))
        if isinstance(chosen, slice):
            some = list(every[chosen])
        else:
            some = [every[number] for number in ([chosen] if isinstance(chosen, int) else chosen)]
        return replace(
            self,
            clean=_some(self.clean, some),
            corrupted=_some(self.corrupted, some),
            answers=_take(self.answers, some),
            against=_take(self.against, some),
            slots=_take(self.slots, some),
        )

    @property
    def metric(self) -> logit_diff:
        """The logit of each answer minus that of what it is compared with."""
        return logit_diff(self.answers, self.against)

    def positions(self, slot: str) -> PerPrompt:
        """Where the words of a slot stand, in a form that every `positions=` takes.

        >>> import resstream as rs
        >>> pairs = rs.prompts.indirect_object(rs.load("smollm2"), count=2, seed=0)
        >>> pairs.positions("S2")
        PerPrompt(positions=((12,), (14,)))

        Raises:
            PromptError: a slot that a pair does not have.
        """
        for number, here in enumerate(self.slots):
            if slot not in here:
                raise PromptError(f"no slot {slot!r} in pair {number} of {self.name}, which has {listed(here)}")
        return PerPrompt(tuple(here[slot] for here in self.slots))

    def __repr__(self) -> str:
        lines = [f"Pairs({self.name} of {self.model}: {len(self)} pair{'s' * (len(self) != 1)})"]
        if len(self):
            more = f", and {len(self) - 1} more" if len(self) > 1 else ""
            lines += [
                f"  clean      {_text(self.clean)}",
                f"  corrupted  {_text(self.corrupted)}",
                f"  answer     {self.answers[0]!r}, against {self.against[0]!r}{more}",
            ]
        return "\n".join(lines)


def _take(items: Sequence[_Item], some: Sequence[int]) -> tuple[_Item, ...]:
    return tuple(items[number] for number in some)


def _some(prompts: tuple[str, ...] | Tokens, some: Sequence[int]) -> tuple[str, ...] | Tokens:
    return prompts.take(some) if isinstance(prompts, Tokens) else _take(prompts, some)


def _text(prompts: tuple[str, ...] | Tokens) -> str:
    return "".join(prompts.strings[0]) if isinstance(prompts, Tokens) else prompts[0]
