"""Pairs of prompts, clean and corrupted: matched token by token, and bound to metrics on both sides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from resstream.errors import MetricError, PromptError, SiteError
from resstream.measure.metrics import Metric, extended
from resstream.models.tokens import Prompts, Tokens, join
from resstream.models.trunk import ResidualModel
from resstream.sites import Site
from resstream.stream.memory import peak_bytes
from resstream.stream.rows import Base
from resstream.stream.run import Score

Direction = Literal["denoise", "noise"]


@dataclass(frozen=True)
class Pairs:
    """Prompts in pairs, as many tokens each.

    Attributes:
        clean, corrupted: the two sides.
    """

    clean: Tokens
    corrupted: Tokens

    @classmethod
    def of(cls, model: ResidualModel, clean: Prompts, corrupted: Prompts, metrics: Sequence[Metric]) -> Pairs:
        """Tokenise both sides, and check that they pair up.

        Raises:
            MetricError: no metric.
            PromptError: another number of prompts, or of tokens; the message shows both token lists.
        """
        if not metrics:
            raise MetricError("no metrics to measure; give one, such as rs.logit_diff(...), or a list of several")
        first, second = model.tokenize(clean), model.tokenize(corrupted)
        if len(first) != len(second):
            raise PromptError(f"{len(first)} clean prompts, but {len(second)} corrupted ones; give them in pairs")
        first, second = (extended(model, tokens, metrics) for tokens in (first, second))
        for number, (one, other) in enumerate(zip(first.strings, second.strings, strict=True)):
            if len(one) != len(other):
                raise PromptError(
                    f"pair {number} does not align: the clean prompt has {len(one)} tokens, the other {len(other)}\n"
                    f"  clean:     {list(one)}\n  corrupted: {list(other)}\n"
                    "positions could not be matched; rephrase one so that both have as many tokens"
                )
        return cls(first, second)

    def __len__(self) -> int:
        return len(self.clean)

    @property
    def both(self) -> Tokens:
        """One batch: clean prompts come first, and each one's corrupted twin is `len(self)` rows further on."""
        return join(self.clean, self.corrupted)

    def sides(self, pair: int, direction: Direction) -> tuple[int, int]:
        """Whose run is patched, and whose activations are moved into it, as rows of `both`."""
        ends = pair + len(self), pair
        return ends if direction == "denoise" else ends[::-1]

    def by_length(self, most: int) -> Iterator[tuple[list[int], Pairs]]:
        """Pairs of one length at a time, so that none is padded, at most so many positions together."""
        lengths = self.clean.lengths
        for length in sorted(set(lengths)):
            same = [pair for pair, own in enumerate(lengths) if own == length]
            size = max(1, most // length)
            for start in range(0, len(same), size):
                some = same[start : start + size]
                yield some, Pairs(self.clean.take(some).narrow(), self.corrupted.take(some).narrow())

    def positions_at_once(self, model: ResidualModel, kept: Sequence[Site], memory: int) -> int:
        """How many positions of pairs fit a memory with all that their base runs keep, as the runs of one pair show."""
        if len(self) == 1:
            return self.both.width
        one = Pairs(self.clean.alone(0), self.corrupted.alone(0)).both
        return memory * one.width // peak_bytes(lambda: Base.of(model, one, kept))

    def first_difference(self, pair: int) -> int:
        """The first position at which the two tokens differ; beyond the last one if they never do."""
        apart = (self.clean.ids[pair] != self.corrupted.ids[pair]).nonzero()
        return int(apart[0]) if len(apart) else self.clean.width

    def bind(self, model: ResidualModel, metric: Metric, final: Tensor) -> Score:
        """Bind a metric to clean and corrupted prompts, each side on its own: a pair shares its answer."""
        halves = ((self.clean, final[: len(self)]), (self.corrupted, final[len(self) :]))
        bound = [metric.bind(model, tokens, base) for tokens, base in halves]

        def score(final: Tensor, prompts: Sequence[int]) -> Tensor:
            rows = [[row for row, prompt in enumerate(prompts) if prompt // len(self) == half] for half in (0, 1)]
            found = [
                part(final[some], [prompts[row] % len(self) for row in some])
                for part, some in zip(bound, rows, strict=True)
                if some
            ]
            return torch.cat(found)[torch.tensor(rows[0] + rows[1]).argsort()]

        return score


def require_direction(direction: str) -> None:
    """Refuse a way to patch that is neither.

    Raises:
        SiteError: with the two that there are.
    """
    if direction not in ("denoise", "noise"):
        raise SiteError(f'direction="{direction}" is not a way to patch; write "denoise" or "noise"')
