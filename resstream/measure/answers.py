"""Answers: the tokens that a metric scores, from the text or the token ids that a user gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from resstream.errors import MetricError
from resstream.models.tokens import Tokens
from resstream.models.trunk import ResidualModel

Answer: TypeAlias = "str | int | Sequence[str | int]"


def answers_of(answer: Answer, prompts: int) -> list[str | int]:
    """Each prompt's answer.

    Raises:
        MetricError: a list of another length than the prompts.
    """
    answers = [answer] * prompts if isinstance(answer, (str, int)) else list(answer)
    if len(answers) != prompts:
        raise MetricError(f"{len(answers)} answers for {prompts} prompts; give one answer, or one for each prompt")
    return answers


def answer_tokens(model: ResidualModel, answer: Answer, prompts: int) -> list[list[int]]:
    """The token ids of each prompt's answer.

    Raises:
        MetricError: an answer without tokens, or a list of another length than the prompts.
    """
    return [_ids_of(model, each) for each in answers_of(answer, prompts)]


def answer_ids(model: ResidualModel, answer: Answer, prompts: int) -> list[int]:
    """The token id of each prompt's answer, where a single one is asked for.

    Raises:
        MetricError: an answer that is not one token, or a list of another length than the prompts.
    """
    found = answer_tokens(model, answer, prompts)
    for asked, ids in zip(answers_of(answer, prompts), found, strict=True):
        if len(ids) != 1:
            pieces = [model.token_string(token) for token in ids]
            raise MetricError(
                f"the answer {asked!r} is {len(ids)} tokens {pieces}, but a single next token is scored; "
                f"give an answer of one token, or score it whole with rs.log_prob({asked!r}){meant(model, asked)}"
            )
    return [token for (token,) in found]


def require_different(model: ResidualModel, answers: Sequence[int], against: Sequence[int]) -> None:
    """Refuse answers whose difference would always be 0.

    Raises:
        MetricError: an answer that is the same token as what it is compared with.
    """
    for first, second in zip(answers, against, strict=True):
        if first == second:
            raise MetricError(
                f"the two answers are the same token {model.token_string(first)!r} (id {first}), "
                "so their difference is always 0; give two that differ"
            )


def require_forced(model: ResidualModel, tokens: Tokens, answers: Sequence[Sequence[int]]) -> None:
    """Refuse prompts that are not followed by what their answers are scored after.

    Raises:
        MetricError: with what stands after the prompt.
    """
    for prompt, (answer, last, length) in enumerate(zip(answers, tokens.last, tokens.lengths, strict=True)):
        there = tokens.ids[prompt, last + 1 : length].tolist()
        if there != list(answer[:-1]):
            pieces = [model.token_string(token) for token in answer]
            raise MetricError(
                f"the answer to prompt {prompt} is {len(answer)} tokens {pieces}, but the prompt was run with "
                f"{[model.token_string(token) for token in there]} after it; run what metric.extend(model, tokens) "
                "gives, or give an answer of one token"
            )


def meant(model: ResidualModel, answer: str | int) -> str:
    """What was probably meant by an answer of several tokens: the same after a space, if that is one."""
    if isinstance(answer, int) or len(_ids_of(model, answer)) == 1 or len(_ids_of(model, f" {answer}")) != 1:
        return ""
    return f"; did you mean {' ' + answer!r}?"


def spell(answer: Answer) -> str:
    """What to call an answer in a metric's name."""
    if isinstance(answer, (str, int)):
        return repr(answer)
    return repr(answer[0]) if len(set(answer)) == 1 else f"of {len(answer)} answers"


def some_of(answer: Answer, prompts: Sequence[int]) -> Answer:
    """The answers of some of the prompts, where each has its own."""
    return answer if isinstance(answer, (str, int)) else [answer[prompt] for prompt in prompts]


def _ids_of(model: ResidualModel, answer: str | int) -> list[int]:
    if isinstance(answer, int):
        if not 0 <= answer < model.vocab_size:
            raise MetricError(f"no token id {answer}: {model.name} knows ids 0 to {model.vocab_size - 1}")
        return [answer]
    if model.tokenizer is None:
        raise MetricError(f"{model.name} was loaded without a tokenizer; give the answer {answer!r} as a token id")
    ids = model.tokenizer(answer, add_special_tokens=False)["input_ids"]
    if not ids:
        raise MetricError(f"the answer {answer!r} has no tokens; give a word such as ' Paris'")
    return list(map(int, ids))
