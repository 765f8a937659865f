"""Prompts: clean and corrupted ones in pairs, made from templates with a seed and aligned for the model at hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from random import Random
from typing import Literal

import torch

from resstream.errors import PromptError, listed
from resstream.models.trunk import ResidualModel
from resstream.prompts.drawing import draw, require_count
from resstream.prompts.frames import Filler, Fillers, Frame
from resstream.prompts.pairs import Pairs as Pairs
from resstream.prompts.words import EVENTS, FACTS, LASTING, MEETINGS, NAMES, NEARBY, NOUNS, PLACES, THINGS, VERBS


def indirect_object(
    model: ResidualModel,
    *,
    count: int = 32,
    seed: int = 0,
    order: Literal["ABBA", "BABA", "both"] = "both",
    corrupt: Literal["swap", "names"] = "swap",
) -> Pairs:
    """Two people are named, one of them again: who is given something is the other one.

    >>> import resstream as rs
    >>> model = rs.load("smollm2")
    >>> rs.prompts.indirect_object(model, count=16, seed=1, order="ABBA")
    Pairs(indirect_object of smollm2: 16 pairs)
      clean      While Ruth and George were walking to the museum, George offered a ring to
      corrupted  While Ruth and George were walking to the museum, Ruth offered a ring to
      answer     ' Ruth', against ' George', and 15 more

    Args:
        model: a model from `load`; its tokenizer decides which names are one token.
        count: how many pairs.
        seed: which ones.
        order: "ABBA" names the receiver (A) first, "BABA" the giver (B) first, and "both" draws from both.
        corrupt: in the corrupted prompt, "swap" names the other person again, so that the two answers change places;
            "names" puts three other names in, so that neither answer is right.
    Returns:
        Pairs whose slots are "IO", the receiver; "S1" and "S2", the giver; "place" and "thing".
    Raises:
        PromptError: an unknown order or corruption, or fewer pairs than asked for.
    Source:
        Wang et al. 2022, Interpretability in the Wild, section 2, for the task; the sentences are of their own.
    """
    _require_known("order", order, ("ABBA", "BABA", "both"))
    _require_known("corrupt", corrupt, ("swap", "names"))
    orders = [("{IO}", "{S1}"), ("{S1}", "{IO}")]
    chosen = orders if order == "both" else [orders[order == "BABA"]]
    texts = [text.replace("{first}", a).replace("{second}", b) for text in MEETINGS for a, b in chosen]
    fillers: Fillers = {"IO": NAMES, "S1": NAMES, "S2": "S1", "place": PLACES, "thing": THINGS}
    changes = {"S2": "IO"}
    if corrupt == "names":
        fillers, changes = {**fillers, "X": NAMES, "Y": NAMES, "Z": NAMES}, {"IO": "X", "S1": "Y", "S2": "Z"}
    frames = [Frame(text, fillers, changes, answer=" {IO}", against=" {S1}") for text in texts]
    return draw(model, "indirect_object", frames, count, seed)


def facts(
    model: ResidualModel,
    *,
    relation: Literal["capital", "language", "continent", "opposite"] = "capital",
    count: int = 32,
    seed: int = 0,
) -> Pairs:
    """A fact about one subject, corrupted by another subject of which something else is true.

    >>> import resstream as rs
    >>> model = rs.load("smollm2")
    >>> rs.prompts.facts(model, relation="opposite", count=8, seed=3)
    Pairs(opposite of smollm2: 8 pairs)
      clean      What is not thick is
      corrupted  What is not false is
      answer     ' thin', against ' true', and 7 more

    Args:
        model: a model from `load`.
        relation: what is asked: the "capital", "language" or "continent" of a country, or the "opposite" of a word.
        count: how many pairs.
        seed: which ones.
    Returns:
        Pairs whose slot is "subject"; the answer that is compared with is right for the corrupted prompt.
    Raises:
        PromptError: an unknown relation, or fewer pairs than asked for.
    Source:
        Meng et al. 2022, Locating and Editing Factual Associations in GPT, for the task.
    """
    _require_known("relation", relation, tuple(FACTS))
    texts, rows = FACTS[relation]
    subjects = [dict(zip(("name", "answer"), row.split(":"), strict=True)) for row in rows.split()]
    fillers = {"subject": subjects, "other": subjects}
    changes = {"subject.name": "other.name"}
    frames = [Frame(text, fillers, changes, " {subject.answer}", " {other.answer}") for text in texts]
    return draw(model, relation, frames, count, seed)


def greater_than(model: ResidualModel, *, count: int = 32, seed: int = 0) -> Pairs:
    """Something ends after it began: of two numbers that complete the last year, only one is late enough.

    >>> import resstream as rs
    >>> model = rs.load("smollm2")
    >>> rs.prompts.greater_than(model, count=8, seed=0)
    Pairs(greater_than of smollm2: 8 pairs)
      clean      The project lasted from the year 1260 to the year 12
      corrupted  The project lasted from the year 1201 to the year 12
      answer     '9', against '2', and 7 more

    The corrupted prompt begins in the first year of the century, so that both numbers are late enough and the metric
    falls, but need not change its sign. Where the tokenizer reads a year digit by digit, the answer is the digit of the
    decade; where it reads the last two digits as one token, it is these two.

    Args:
        model: a model from `load`.
        count: how many pairs.
        seed: which ones.
    Returns:
        Pairs whose slots are "event"; "start", the first year; and "century", the first half of the last year.
    Raises:
        PromptError: fewer pairs than asked for, as where the tokenizer reads years in another way.
    Source:
        Hanna, Liu, Variengien 2023, How does GPT-2 compute greater-than?, for the task.
    """
    rng = Random(seed)
    every = product((1, 2), range(11, 18), range(3, 98))
    spans = [row for digits, century, year in every if (row := _year(century, year, digits, rng))]
    fillers: Fillers = {"event": EVENTS, "start": spans, "century": "start"}
    changes = {"start.year": "start.first"}
    frames = [Frame(text, fillers, changes, "{start.after}", "{start.before}") for text in LASTING]
    return draw(model, "greater_than", frames, count, seed)


def agreement(model: ResidualModel, *, count: int = 32, seed: int = 0) -> Pairs:
    """A verb agrees with its subject, and not with the noun that stands between them.

    >>> import resstream as rs
    >>> model = rs.load("smollm2")
    >>> rs.prompts.agreement(model, count=8, seed=0)
    Pairs(agreement of smollm2: 8 pairs)
      clean      The farmers in front of the boys
      corrupted  The farmer in front of the boys
      answer     ' were', against ' was', and 7 more

    The corrupted prompt has the same subject in the other number, so that the two answers change places.

    Args:
        model: a model from `load`.
        count: how many pairs.
        seed: which ones.
    Returns:
        Pairs whose slots are "subject" and "other", the noun in between.
    Raises:
        PromptError: fewer pairs than asked for.
    Source:
        Linzen, Dupoux, Goldberg 2016, Assessing the Ability of LSTMs to Learn Syntax-Sensitive Dependencies, for the
        task; the sentences are of their own.
    """
    forms = ("one", "many")
    nouns = [dict(zip(forms, noun.split(":"), strict=True)) for noun in NOUNS]
    fillers = {"subject": nouns, "other": nouns, "verb": [dict(zip(forms, v.split(":"), strict=True)) for v in VERBS]}
    frames = []
    for text, (own, wrong), other in product(NEARBY, (forms, forms[::-1]), forms):
        written = text.replace("{subject}", f"{{subject.{own}}}").replace("{other}", f"{{other.{other}}}")
        changes = {f"subject.{own}": f"subject.{wrong}"}
        frames.append(Frame(written, fillers, changes, f" {{verb.{own}}}", f" {{verb.{wrong}}}"))
    return draw(model, "agreement", frames, count, seed)


def induction(model: ResidualModel, *, count: int = 32, seed: int = 0, length: int = 20) -> Pairs:
    """Random tokens that begin to repeat: what comes next is what followed the first time.

    >>> import resstream as rs
    >>> pairs = rs.prompts.induction(rs.load("smollm2"), count=4, seed=0, length=10)
    >>> pairs.clean.lengths, pairs.slots[0]
    ((16, 16, 16, 16), {'earlier': (5,), 'follower': (6,), 'repeat': (10, 11, 12, 13, 14, 15)})

    In the corrupted prompt another token followed the first time, and it is what the answer is compared with.

    Args:
        model: a model from `load`, with or without a tokenizer.
        count: how many pairs.
        seed: which ones.
        length: how many tokens there are before they repeat, all of them different; half of them are then repeated.
    Returns:
        Pairs of token ids, whose slots are "earlier", where the last token stood the first time; "follower", the
        token after it; and "repeat", the tokens that are repeats.
    Raises:
        PromptError: fewer than 2 tokens to repeat, or a vocabulary or context that is too small.
    Source:
        Olsson et al. 2022, In-context Learning and Induction Heads.
    """
    require_count(count)
    before, ordinary = _vocabulary(model)
    last = length // 2
    exist = math.perm(len(ordinary), length + 1)
    if length < 2 or exist < count:
        raise PromptError(
            f"only {exist} induction pairs of {length} different tokens, and one to compare with, can be made from the "
            f"{len(ordinary)} ordinary tokens of {model.name}, but count={count}; give a length from 2 to "
            f"{len(ordinary) - 1}, and a smaller count"
        )
    rng, drawn = Random(seed), dict[tuple[int, ...], None]()
    while len(drawn) < count:
        drawn[tuple(rng.sample(ordinary, length + 1))] = None
    rows = [([*tokens[:-1]], tokens[last + 1], tokens[-1]) for tokens in drawn]
    clean = [[*before, *tokens, *tokens[: last + 1]] for tokens, _, _ in rows]
    other = [
        [*before, *tokens[: last + 1], wrong, *tokens[last + 2 :], *tokens[: last + 1]] for tokens, _, wrong in rows
    ]
    start = len(before)
    repeat = tuple(range(start + length, start + length + last + 1))
    slots = {"earlier": (start + last,), "follower": (start + last + 1,), "repeat": repeat}
    return Pairs(
        "induction",
        model.name,
        model.tokenize(torch.tensor(clean)),
        model.tokenize(torch.tensor(other)),
        answers=tuple(right for _, right, _ in rows),
        against=tuple(wrong for _, _, wrong in rows),
        slots=(slots,) * count,
    )


def template(
    model: ResidualModel,
    text: str | Sequence[str],
    fillers: Mapping[str, Sequence[Filler] | str],
    *,
    corrupt: Mapping[str, str],
    answer: str,
    against: str,
    count: int = 32,
    seed: int = 0,
    name: str = "template",
) -> Pairs:
    """Pairs from a text of your own, with slots for words.

    >>> import resstream as rs
    >>> model = rs.load("smollm2")
    >>> animals = [{"name": "dog", "young": "puppy"}, {"name": "sheep", "young": "lamb"}]
    >>> rs.prompts.template(
    ...     model,
    ...     "A young {animal.name} is called a",
    ...     {"animal": animals, "other": animals},
    ...     corrupt={"animal.name": "other.name"},
    ...     answer=" {animal.young}",
    ...     against=" {other.young}",
    ...     count=2,
    ... )
    Pairs(template of smollm2: 2 pairs)
      clean      A young sheep is called a
      corrupted  A young dog is called a
      answer     ' lamb', against ' puppy', and 1 more

    No two slots of a pair are filled alike, but for those that repeat another. Left out are pairs of which an answer is
    not one token after both prompts, and pairs in which a slot does not stand at the same positions in both.

    Args:
        model: a model from `load`.
        text: the clean prompt with slots in braces, or several such texts to draw from; {animal} stands for a word,
            {animal.name} for one form of it.
        fillers: for each slot its words, or mappings from form to word; or the name of the slot that it repeats, to
            tell two places of one word apart. Slots may be used in the answers or the corrupted prompt alone.
        corrupt: for each slot to change, as it is written in the text, what is written there in the corrupted prompt.
        answer: the next token of the clean prompt, with slots; mind the leading space.
        against: what it is compared with, usually the next token of the corrupted prompt.
        count: how many pairs.
        seed: which ones.
        name: what to call them.
    Raises:
        PromptError: a slot without words, nothing to corrupt, or fewer pairs than asked for.
    """
    texts = [text] if isinstance(text, str) else list(text)
    frames = [Frame(each, fillers, corrupt, answer, against) for each in texts]
    return draw(model, name, frames, count, seed)


def _year(century: int, year: int, digits: int, rng: Random) -> dict[str, str] | None:
    """A year with a later and an earlier completion of its century, in one digit or two, if there are both."""
    begin, top = (year, 99) if digits == 2 else (year // 10, 9)
    low = 2 if digits == 2 else 1  # the corrupted prompt's year, 01, is before both
    if begin <= low or begin >= top:
        return None
    return {
        "year": f"{century}{year:02d}",
        "first": f"{century}01",
        "century": str(century),
        "after": f"{rng.randint(begin + 1, top):0{digits}d}",
        "before": f"{rng.randint(low, begin - 1):0{digits}d}",
    }


def _vocabulary(model: ResidualModel) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer puts before every text, and those that are pieces of text."""
    if model.tokenizer is None:
        return [], list(range(model.vocab_size))
    special = {*model.tokenizer.all_special_ids, *model.tokenizer.added_tokens_decoder}
    empty = model.tokenizer("")["input_ids"]
    ordinary = [token for token in range(min(len(model.tokenizer), model.vocab_size)) if token not in special]
    return [token for token in empty if token in special], ordinary


def _require_known(argument: str, asked: str, known: Sequence[str]) -> None:
    if asked not in known:
        raise PromptError(f'{argument}="{asked}" is not known; choose from {listed(known)}')
