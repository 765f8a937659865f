"""Metrics: what to read off the logits, as one number for each run; only the logits asked for are ever computed."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from resstream.errors import MetricError
from resstream.measure.answers import (
    Answer,
    answer_ids,
    answer_tokens,
    answers_of,
    meant,
    require_different,
    require_forced,
    some_of,
    spell,
)
from resstream.models.tokens import Tokens, force
from resstream.models.trunk import ResidualModel

Score: TypeAlias = Callable[[Tensor, Sequence[int]], Tensor]

# One piece of logits, in bytes; a few such pieces are alive at a time.
_PIECE = 64 * 2**20


class Metric(ABC):
    """One number for each run of a prompt; a plain function of the logits serves as one, too.

    >>> logit_diff(" Mary", " John").name
    "logit difference ' Mary' - ' John'"
    >>> as_metric(lambda logits: logits[:, -1].amax(-1)).units
    'its own units'

    Attributes:
        name: what to call it on an axis.
        units: the unit of its value and of its differences.
    """

    name: str
    units: str

    def extend(self, model: ResidualModel, tokens: Tokens) -> Tokens:
        """The prompts as they are to be run: as they are, unless the metric scores more than one next token."""
        return tokens

    @abstractmethod
    def bind(self, model: ResidualModel, tokens: Tokens, base: Float[Tensor, "prompt pos d_model"]) -> Score:
        """Check the metric against model and prompts, and make it a function of last residuals.

        Args:
            model: the model whose readout is used.
            tokens: the prompts of the base run.
            base: last residuals of the base run, for metrics that compare with it.
        Returns:
            A function from ("row pos d_model", the prompt of each row) to one number a row, in float32 or wider.
        """

    def take(self, prompts: Sequence[int]) -> Metric:
        """The metric of some of the prompts, in this order."""
        return self


@dataclass(frozen=True)
class logit_diff(Metric):
    """Logit of one answer minus logit of another, at the last token of each prompt.

    >>> logit_diff(" Mary", " John").units
    'logits'

    Args:
        answer: a token as text (mind the leading space) or as an id; a list gives each prompt its own.
        against: the token that it is compared with, likewise.
    Raises:
        MetricError: an answer of several tokens, or two answers that share their first token (when bound to a model).
    Source:
        Wang et al. 2022, Interpretability in the Wild, section 2.
    """

    answer: Answer
    against: Answer
    units = "logits"

    @property
    def name(self) -> str:  # type: ignore[override]
        """What to call it on an axis."""
        return f"logit difference {spell(self.answer)} - {spell(self.against)}"

    def extend(self, model: ResidualModel, tokens: Tokens) -> Tokens:
        """The prompts as they are, once each is known to have its answers."""
        for answer in (self.answer, self.against):
            answers_of(answer, len(tokens))
        return tokens

    def take(self, prompts: Sequence[int]) -> logit_diff:
        """The answers of some of the prompts."""
        return replace(self, answer=some_of(self.answer, prompts), against=some_of(self.against, prompts))

    def bind(self, model: ResidualModel, tokens: Tokens, base: Float[Tensor, "prompt pos d_model"]) -> Score:
        """Find the two token ids of each prompt."""
        right, wrong = (answer_ids(model, each, len(tokens)) for each in (self.answer, self.against))
        require_different(model, right, wrong)
        vocab = sorted({*right, *wrong})
        place = {token: column for column, token in enumerate(vocab)}

        def score(final: Tensor, prompts: Sequence[int]) -> Tensor:
            logits = wide(model.readout(at_last(final, tokens, prompts), vocab))
            rows = torch.arange(len(prompts), device=logits.device)
            plus = [place[right[prompt]] for prompt in prompts]
            minus = [place[wrong[prompt]] for prompt in prompts]
            return logits[rows, plus] - logits[rows, minus]

        return score


@dataclass(frozen=True)
class log_prob(Metric):
    """Log-probability of an answer as the continuation of each prompt, of all its tokens together.

    An answer of several tokens is teacher-forced: it is put after the prompt before the prompt is run, and each of its
    tokens is scored after those before it.

    >>> log_prob(" Paris, France").units
    'nats'

    Args:
        answer: one or more tokens as text (mind the leading space), or one as an id; a list gives each prompt its own.
    Raises:
        MetricError: an answer without tokens, or prompts that are not followed by theirs (when bound to a model).
        PromptError: a prompt that is too long with its answer (when extended by it).
    """

    answer: Answer
    units = "nats"

    @property
    def name(self) -> str:  # type: ignore[override]
        """What to call it on an axis."""
        return f"log-probability of {spell(self.answer)}"

    def extend(self, model: ResidualModel, tokens: Tokens) -> Tokens:
        """Put each answer after its prompt, all but its last token, which nothing is predicted from."""
        answers = answer_tokens(model, self.answer, len(tokens))
        if all(len(ids) == 1 for ids in answers):
            return tokens
        for asked in dict.fromkeys(answers_of(self.answer, len(tokens))):
            if hint := meant(model, asked):
                warnings.warn(f"the answer {asked!r} is scored as several tokens{hint}", stacklevel=2)
        before_last = [ids[:-1] for ids in answers]
        return force(tokens, before_last, tokenizer=model.tokenizer, max_positions=model.max_positions)

    def take(self, prompts: Sequence[int]) -> log_prob:
        """The answers of some of the prompts."""
        return replace(self, answer=some_of(self.answer, prompts))

    def bind(self, model: ResidualModel, tokens: Tokens, base: Float[Tensor, "prompt pos d_model"]) -> Score:
        """Find the tokens of each prompt's answer, and the positions that they are predicted from."""
        answers = answer_tokens(model, self.answer, len(tokens))
        require_forced(model, tokens, answers)
        last = tokens.last

        def score(final: Tensor, prompts: Sequence[int]) -> Tensor:
            places = [
                (row, last[prompt] + step, token)
                for row, prompt in enumerate(prompts)
                for step, token in enumerate(answers[prompt])
            ]
            rows, positions, targets = torch.tensor(places, device=final.device).T
            residuals = final[rows, positions]

            def piece(part: slice) -> Tensor:
                logits = wide(model.readout(residuals[part])).log_softmax(-1)
                return logits.gather(-1, targets[part, None])[:, 0]

            return _sum_by_row(in_pieces(piece, len(rows), model), rows, len(prompts))

        return score


@dataclass(frozen=True)
class loss(Metric):
    """Mean cross-entropy of each prompt's own next tokens.

    >>> loss().units
    'nats'

    Raises:
        MetricError: a prompt of one token, which has no next token (when bound to a model).
    """

    name = "loss"
    units = "nats"

    def bind(self, model: ResidualModel, tokens: Tokens, base: Float[Tensor, "prompt pos d_model"]) -> Score:
        """Check that each prompt has a next token to predict."""
        _require_next_tokens(tokens)

        def score(final: Tensor, prompts: Sequence[int]) -> Tensor:
            rows, positions, owners = _real(tokens, prompts, drop_last=True)
            residuals = final[rows, positions]
            targets = tokens.ids[owners, positions + 1]

            def piece(part: slice) -> Tensor:
                logits = wide(model.readout(residuals[part]))
                return torch.nn.functional.cross_entropy(logits, targets[part], reduction="none")

            return _mean_by_row(in_pieces(piece, len(rows), model), rows, len(prompts))

        return score


@dataclass(frozen=True)
class kl_from_base(Metric):
    """Kullback-Leibler divergence between next-token distributions, base run to changed run, mean over positions.

    >>> kl_from_base().units
    'nats'
    """

    name = "KL from the base run"
    units = "nats"

    def bind(self, model: ResidualModel, tokens: Tokens, base: Float[Tensor, "prompt pos d_model"]) -> Score:
        """Keep the base run's last residuals; its distributions are computed again piece by piece."""

        def score(final: Tensor, prompts: Sequence[int]) -> Tensor:
            rows, positions, owners = _real(tokens, prompts)
            new, old = final[rows, positions], base[owners, positions]

            def piece(part: slice) -> Tensor:
                before = wide(model.readout(old[part])).log_softmax(-1)
                after = wide(model.readout(new[part])).log_softmax(-1)
                return (before.exp() * (before - after)).sum(-1)

            return _mean_by_row(in_pieces(piece, len(rows), model), rows, len(prompts))

        return score


@dataclass(frozen=True)
class custom(Metric):
    """Any function of the logits, "row pos vocab", that gives one number a row.

    >>> custom(lambda logits: logits[:, -1].max(-1).values).name
    '<lambda>'

    Raises:
        MetricError: prompts of unequal lengths, whose padding the function could not know; or a wrong shape.
    """

    function: Callable[[Tensor], Tensor]
    units = "its own units"

    @property
    def name(self) -> str:  # type: ignore[override]
        """What to call it on an axis."""
        return str(getattr(self.function, "__name__", "metric"))

    def bind(self, model: ResidualModel, tokens: Tokens, base: Float[Tensor, "prompt pos d_model"]) -> Score:
        """Check that the prompts have one length."""
        if tokens.padded:
            raise MetricError(
                f"a function of the logits cannot know where prompts of {list(tokens.lengths)} tokens end; "
                "give prompts of one length, or use rs.logit_diff, rs.log_prob, rs.loss or rs.kl_from_base"
            )

        def score(final: Tensor, prompts: Sequence[int]) -> Tensor:
            def piece(part: slice) -> Tensor:
                logits = wide(model.readout(final[part]))
                value = self.function(logits)
                if value.shape != logits.shape[:1]:
                    raise MetricError(
                        f"the metric {self.name} returned shape {list(value.shape)} for {len(logits)} rows of logits; "
                        "it must return one number a row"
                    )
                return value

            return in_pieces(piece, len(final), model, positions=final.shape[1])

        return score


def as_metric(metric: Metric | Callable[[Tensor], Tensor] | None) -> Metric:
    """A metric from what a user may give: a metric, any function of the logits, or None for the loss."""
    if metric is None:
        return loss()
    if isinstance(metric, Metric):
        return metric
    if isinstance(metric, type) or not callable(metric):
        raise MetricError(
            f"{metric!r} is not a metric; give rs.logit_diff(...), rs.log_prob(...), rs.loss(), rs.kl_from_base(), "
            "or a function from logits to one number a row"
        )
    return custom(metric)


def extended(model: ResidualModel, tokens: Tokens, metrics: Sequence[Metric]) -> Tokens:
    """The prompts as they are to be run for all of some metrics.

    Raises:
        MetricError: metrics that want different tokens after the prompts, of which one run can have only one kind.
    """
    runs = [metric.extend(model, tokens) for metric in metrics] or [tokens]
    for metric, run in zip(metrics[1:], runs[1:], strict=True):
        if run.lengths != runs[0].lengths or not torch.equal(run.ids, runs[0].ids):
            raise MetricError(
                f"{metrics[0].name} and {metric.name} cannot be measured in one sweep: an answer of several tokens is "
                "put after each prompt, and these two want different ones there; measure them one at a time"
            )
    return runs[0]


def at_last(final: Tensor, tokens: Tokens, prompts: Sequence[int]) -> Float[Tensor, "row d_model"]:
    """The residual at each row's own last token, before any answer that it is made to give."""
    last = tokens.last
    return final[list(range(len(prompts))), [last[prompt] for prompt in prompts]]


def wide(logits: Tensor) -> Tensor:
    """Logits in float32 or wider: half precision cannot tell 20.03 from 19.97."""
    return logits if logits.dtype is torch.float64 else logits.float()


def in_pieces(piece: Callable[[slice], Tensor], rows: int, model: ResidualModel, positions: int = 1) -> Tensor:
    """Compute something row by row in pieces whose logits fit a fixed budget of memory."""
    size = max(1, _PIECE // (4 * model.vocab_size * positions))
    return torch.cat([piece(slice(start, start + size)) for start in range(0, rows, size)])


def _real(tokens: Tokens, prompts: Sequence[int], drop_last: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Row, position and prompt of every real token; without each prompt's last one where a next token is needed."""
    owners = torch.tensor(list(prompts), device=tokens.ids.device)
    ends = torch.tensor(tokens.lengths, device=tokens.ids.device)[owners] - int(drop_last)
    rows, positions = (torch.arange(tokens.width, device=ends.device)[None] < ends[:, None]).nonzero(as_tuple=True)
    return rows, positions, owners[rows]


def _sum_by_row(values: Tensor, rows: Tensor, count: int) -> Tensor:
    return values.new_zeros(count).index_add(0, rows, values)


def _mean_by_row(values: Tensor, rows: Tensor, count: int) -> Tensor:
    return _sum_by_row(values, rows, count) / torch.bincount(rows, minlength=count)


def _require_next_tokens(tokens: Tokens) -> None:
    if min(tokens.lengths) < 2:
        raise MetricError(
            f"prompt {tokens.lengths.index(min(tokens.lengths))} has one token, so no next token to take the loss of; "
            "give a longer prompt, or a metric such as rs.log_prob"
        )
