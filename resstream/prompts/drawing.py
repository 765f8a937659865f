"""Drawing: fill frames at random, and keep the pairs that fit a model's tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random

from resstream.errors import PromptError
from resstream.models.trunk import ResidualModel
from resstream.prompts.frames import Filled, Filler, Frame, spread
from resstream.prompts.pairs import Pairs

# How many ways to fill a frame are tried, and how many more for each pair that is asked for, so that words which never
# fit cannot keep a search from ending.
_TRIES, _TRIES_EACH = 10_000, 20
# How many characters before an answer decide how it is cut into tokens, at most.
_CONTEXT = 12
# Most words that an error message names.
_NAMED = 8


@dataclass(frozen=True)
class _Pair:
    """One pair that fits."""

    clean: str
    corrupted: str
    answers: tuple[str | int, str | int]
    slots: Mapping[str, tuple[int, ...]]


def draw(model: ResidualModel, name: str, frames: Sequence[Frame], count: int, seed: int) -> Pairs:
    """Different pairs from some frames, by chance; what is drawn depends on the seed and the tokenizer alone.

    Args:
        model: the model whose tokenizer the pairs have to fit.
        name: what the pairs are about.
        frames: what they are made from.
        count: how many.
        seed: which ones.
    Returns:
        Pairs with one token as the answer and one against it, and with each slot at the same positions in both prompts.
    Raises:
        PromptError: no tokenizer, a count below 1, or fewer pairs than asked for; the message says which words failed.
    """
    require_count(count)
    if model.tokenizer is None:
        raise PromptError(
            f"{model.name} was loaded without a tokenizer, so it cannot read text; "
            "load it with rs.load(model, tokenizer=...), or use rs.prompts.induction, which needs none"
        )
    failed: dict[tuple[str, str], str] = {}
    total, rng = sum(frame.size(frame.shown) for frame in frames), Random(seed)
    tries = min(total, _TRIES + _TRIES_EACH * count)
    found: dict[str, _Pair] = {}
    for frame, words in spread(frames, islice(shuffled(total, rng), tries)):
        pair = _completed(model, frame, words, rng, failed)
        if pair is not None:
            found.setdefault(pair.clean, pair)
        if len(found) == count:
            return _pairs(model, name, list(found.values()))
    raise PromptError(_too_few(model, name, len(found), count, tries, total, failed))


def shuffled(total: int, rng: Random) -> Iterator[int]:
    """The numbers below a total in random order, without a list of all of them."""
    moved: dict[int, int] = {}
    for place in range(total):
        other = rng.randrange(place, total)
        yield moved.get(other, other)
        moved[other] = moved.get(place, place)


def require_count(count: int) -> None:
    """Refuse to draw nothing.

    Raises:
        PromptError: a count below 1.
    """
    if count < 1:
        raise PromptError(f"count={count} asks for no pairs; give 1 or more, such as count=32")


def _completed(
    model: ResidualModel, frame: Frame, words: Mapping[str, Filler], rng: Random, failed: dict[tuple[str, str], str]
) -> _Pair | None:
    """A pair with this clean prompt, if there is one that fits: what else it needs is tried out in random order."""
    if _alike(words):
        return None
    for number in islice(shuffled(frame.size(frame.hidden), rng), _TRIES):
        every = {**words, **frame.choice(frame.hidden, number)}
        if not _alike(every) and (pair := _fitting(model, frame, every, failed)):
            return pair
    return None


def _alike(words: Mapping[str, Filler]) -> bool:
    """Whether two slots have the same words."""
    chosen = list(words.values())
    return any(each in chosen[:place] for place, each in enumerate(chosen))


def _fitting(
    model: ResidualModel, frame: Frame, words: Mapping[str, Filler], failed: dict[tuple[str, str], str]
) -> _Pair | None:
    """The pair that some words make, if each answer is one token and each slot has the same place on both sides."""
    clean, answers = frame.clean(words), frame.answers(words)
    right, wrong = (_next_token(model, clean.text, answer, failed) for answer in answers)
    if right is None or wrong is None or right == wrong:
        return None
    corrupted = frame.corrupted(words)
    if [right, wrong] != [_next_token(model, corrupted.text, answer, failed) for answer in answers]:
        return None
    sides = clean, corrupted
    (width, placed), (other_width, elsewhere) = (_placed(model, side) for side in sides)
    if width != other_width or placed != elsewhere:
        for slot in placed:
            here, there = (" ".join(side.text[start:end] for start, end in side.slots[slot]) for side in sides)
            if len(placed[slot]) != len(elsewhere[slot]):
                failed[here, there] = (
                    f"{here!r} with {there!r} ({len(placed[slot])} tokens with {len(elsewhere[slot])})"
                )
        return None
    spelled = _as_answer(model, answers[0], right), _as_answer(model, answers[1], wrong)
    return _Pair(clean.text, corrupted.text, spelled, placed)


def _next_token(model: ResidualModel, prompt: str, answer: str, failed: dict[tuple[str, str], str]) -> int | None:
    """The one token by which a tokenizer continues a prompt to give an answer."""
    context = prompt[-_CONTEXT:]
    if (context, answer) in failed:
        return None
    before, after = _ids(model, prompt), _ids(model, prompt + answer)
    if after[:-1] == before and after[-1] != getattr(model.tokenizer, "unk_token_id", None):
        return after[-1]
    pieces = [model.token_string(token) for token in after[len(before) :]]
    failed[context, answer] = f"{answer!r} ({pieces} after {context!r})"
    return None


def _placed(model: ResidualModel, side: Filled) -> tuple[int, dict[str, tuple[int, ...]]]:
    """How many tokens a prompt has, and the positions of each slot's words."""
    tokens = model.tokenize(side.text)
    text = tokens.texts[0]()
    start = text.text.find(side.text)  # where a tokenizer only decodes, the text may begin with special tokens
    if start < 0:
        raise PromptError(
            f"the tokenizer of {model.name} reads {side.text!r} as {text.text!r}, so slots cannot be found in it; "
            "load the model with its fast tokenizer"
        )
    placed = {}
    for slot, spans in side.slots.items():
        touched = {token for first, end in spans for token in text.tokens_between(start + first, start + end)}
        placed[slot] = tuple(sorted(touched))
    return tokens.width, placed


def _as_answer(model: ResidualModel, answer: str, token: int) -> str | int:
    """The answer as text where the tokenizer reads it alone as the same token; otherwise the token's id."""
    return answer if list(model.tokenizer(answer, add_special_tokens=False)["input_ids"]) == [token] else token


def _ids(model: ResidualModel, text: str) -> list[int]:
    return list(map(int, model.tokenizer(text)["input_ids"]))


def _pairs(model: ResidualModel, name: str, found: Sequence[_Pair]) -> Pairs:
    return Pairs(
        name,
        model.name,
        clean=tuple(pair.clean for pair in found),
        corrupted=tuple(pair.corrupted for pair in found),
        answers=tuple(pair.answers[0] for pair in found),
        against=tuple(pair.answers[1] for pair in found),
        slots=tuple(pair.slots for pair in found),
    )


def _too_few(
    model: ResidualModel,
    name: str,
    found: int,
    count: int,
    tries: int,
    total: int,
    failed: Mapping[tuple[str, str], str],
) -> str:
    """Why there are fewer pairs than asked for."""
    searched = f" among the first {tries} of {total} ways to fill them" if tries < total else ""
    words = list({word: why for (_, word), why in failed.items()}.values())
    left_out = f"; left out were {', '.join(words[:_NAMED])}" if words else ""
    left_out += f" and {len(words) - _NAMED} more" if len(words) > _NAMED else ""
    remedy = f"ask for count={found} or fewer" if found else "give words that are one token each"
    fit = f"only {found} {name} pairs fit the tokenizer of {model.name}{searched}"
    return f"{fit}, but count={count}; {remedy}{left_out}"
