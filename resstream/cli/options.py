"""The options that commands share, and how what was typed becomes what a measure takes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

_SUFFIXES = (".png", ".pdf", ".svg", ".csv", ".nc")
_SPAN = re.compile(r"\s*(\d+)-(\d+)\s*")
_NUMBER = re.compile(r"\s*-?\d+\s*")
_HEAD = re.compile(r"\s*\d+\.head\.\d+\s*")


def _outs(paths: list[Path] | None) -> list[Path]:
    """Refuse a suffix before the measure runs rather than after."""
    for path in paths or []:
        if path.suffix not in _SUFFIXES:
            raise typer.BadParameter(f'"{path}" does not say what to write: end it in {", ".join(_SUFFIXES)}')
    return list(paths or [])


Model = Annotated[str, typer.Option(help="A bundled model, a folder, a .gguf file, or a hub id.")]
Out = Annotated[
    list[Path] | None,
    typer.Option(help="File to write, by suffix: .png .pdf .svg .csv .nc; repeat it for several.", callback=_outs),
]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads to compute with.")]
Prompts = Annotated[list[str], typer.Argument(help="One prompt, or several.", show_default=False)]
Answer = Annotated[str | None, typer.Option(help="Next token to follow; mind the leading space.")]
RightAnswer = Annotated[str, typer.Option(help="Right next token; mind the leading space.", show_default=False)]
Against = Annotated[str | None, typer.Option(help="Next token to compare it with.")]
Layers = Annotated[str, typer.Option(help='"each", or numbers and ranges such as 0,5,8-11.')]


def site_option(what: str, default: str) -> Any:
    """An option that names sites, any number of them."""
    return typer.Option(help=f"{what}, by default {default}; repeat the option for several.")


def metric_of(answer: str | Sequence[str] | None, against: str | Sequence[str] | None) -> Any:
    """A logit difference of two answers, the log-probability of one, or none: the loss; lists have one a prompt."""
    from resstream.measure.metrics import log_prob, logit_diff

    if answer is None:
        if against is not None:
            raise typer.BadParameter("--against compares with an answer; give --answer, too")
        return None
    return log_prob(answer) if against is None else logit_diff(answer, against)


def layers_of(text: str, *, sets: bool = False) -> Any:
    """Layers as they are typed; with sets, "3+5" stands for two that are removed together, and heads have names.

    >>> layers_of("each"), layers_of("0,5,8-11"), layers_of("3+5,2", sets=True)
    ('each', [0, 5, 8, 9, 10, 11], [[3, 5], 2])
    >>> layers_of("5.head.3,5.head.4+7.head.0", sets=True)
    ['5.head.3', ['5.head.4', '7.head.0']]
    """
    if text == "each":
        return text
    form = "0,5,8-11 or 3+5, or heads as in 5.head.3" if sets else "0,5,8-11"
    return _listed(text, "layer", f'write "each", or numbers as in {form}', sets=sets)


def parts_of(text: str, what: str) -> Any:
    """Heads or neurons as they are typed.

    >>> parts_of("each", "head"), parts_of("0,3-5", "head")
    ('each', [0, 3, 4, 5])
    """
    return text if text in ("each", "all") else _listed(text, what, 'write "each", "all", or numbers as in 0,3-5')


def places_of(texts: list[str] | None) -> Any:
    """Choices of positions as they are typed, each on its own: numbers are indices, other text is to be found.

    >>> places_of(None), places_of(["all"]), places_of(["last", "0", " Eiffel"])
    ('each', 'all', ['last', 0, ' Eiffel'])
    """
    if not texts:
        return "each"
    for alone in ("each", "all"):
        if alone in texts and len(texts) > 1:
            raise typer.BadParameter(f'positions "{alone}" leaves no others; give it alone')
    if texts[0] in ("each", "all"):
        return texts[0]
    return [int(text) if _NUMBER.fullmatch(text) else text for text in texts]


def counts_of(text: str | None) -> list[int] | None:
    """Counts as they are typed.

    >>> counts_of("0,1,4-6")
    [0, 1, 4, 5, 6]
    """
    return None if text is None else _listed(text, "count", "write numbers as in 0,1,4-8")


def units_of(text: str, unit: str) -> list[Any] | None:
    """Units as they are typed: layers by number, or writes by name.

    >>> units_of("20-22", "layer"), units_of("20.attn,20.mlp", "write")
    ([20, 21, 22], ['20.attn', '20.mlp'])
    """
    if text == "each":
        return None
    if unit == "write":
        return [name.strip() for name in text.split(",")]
    return _listed(text, "layer", 'write "each", or numbers as in 0,5,8-11')


def positions_of(text: str | None) -> Any:
    """Positions as they are typed: one, several, or a range as in Python.

    >>> positions_of("-1"), positions_of("0,3"), positions_of("1:")
    (-1, [0, 3], slice(1, None, None))
    """
    if text is None:
        return None
    ends = [part.strip() for part in text.split(":")]
    if 2 <= len(ends) <= 3 and all(not end or _NUMBER.fullmatch(end) for end in ends):
        span = slice(*(int(end) if end else None for end in ends))
        if span.step != 0:
            return span
    parts = text.split(",")
    if not all(_NUMBER.fullmatch(part) for part in parts):
        raise typer.BadParameter(f'positions "{text}": write one as in -1, several as in 0,3, or a range as in 1:')
    return int(text) if len(parts) == 1 else [int(part) for part in parts]


def _listed(text: str, what: str, remedy: str, *, sets: bool = False) -> list[Any]:
    """Numbers and ranges between commas; with sets, also numbers that go together."""
    chosen: list[Any] = []
    for part in text.split(","):
        if span := _SPAN.fullmatch(part):
            chosen += range(int(span[1]), int(span[2]) + 1)
        elif _NUMBER.fullmatch(part):
            chosen.append(int(part))
        elif sets and all(_NUMBER.fullmatch(one) or _HEAD.fullmatch(one) for one in part.split("+")):
            members = [int(one) if _NUMBER.fullmatch(one) else one.strip() for one in part.split("+")]
            chosen.append(members if len(members) > 1 else members[0])
        else:
            raise typer.BadParameter(f'{what}s "{text}": "{part}" is no {what}; {remedy}')
    return chosen
