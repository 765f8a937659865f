"""Pairs of prompts from a file: JSON lines, one pair on each, with the answers that go with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

_NEEDED = ("clean", "corrupted", "answer")
_FORM = '{"clean": "...", "corrupted": "...", "answer": " ...", "against": " ..."}'


@dataclass(frozen=True)
class Asked:
    """What is asked of a patching command: the prompts in pairs, and each pair's answers.

    Attributes:
        clean, corrupted: the prompts.
        answer: the next token that is followed.
        against: the one that it is compared with; None follows the answer alone.
    """

    clean: Sequence[str]
    corrupted: Sequence[str]
    answer: Sequence[str]
    against: Sequence[str] | None


def asked_of(
    clean: str | None, corrupted: str | None, answer: str | None, against: str | None, file: Path | None
) -> Asked:
    """The one pair that was typed, or those of a file.

    Raises:
        BadParameter: neither or both, a pair that is not whole, or a file that does not hold pairs.
    """
    if file is not None:
        if any(each is not None for each in (clean, corrupted, answer, against)):
            raise typer.BadParameter("--pairs brings prompts and answers along; give it alone, without others")
        return read_pairs(file)
    if clean is None or corrupted is None or answer is None:
        raise typer.BadParameter(
            "give a clean and a corrupted prompt with --answer, or several pairs with --pairs FILE"
        )
    return Asked([clean], [corrupted], [answer], None if against is None else [against])


def read_pairs(file: Path) -> Asked:
    """The pairs of a file.

    Raises:
        BadParameter: a file that cannot be read, or a line that is not a pair like the others; the message names it.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f'pairs "{file}" cannot be read: {error}; write a text file in UTF-8') from error
    pairs = {number: _pair(file, number, line) for number, line in enumerate(lines, 1) if line.strip()}
    if not pairs:
        raise typer.BadParameter(f'pairs "{file}" is empty; write {_FORM} on each line')
    compared = [number for number, pair in pairs.items() if "against" in pair]
    if 0 < len(compared) < len(pairs):
        lacking = next(number for number in pairs if number not in compared)
        raise _refused(file, lacking, f'no "against", which line {compared[0]} has; give it on every line or on none')
    columns = ([pair[name] for pair in pairs.values()] for name in (*_NEEDED, *(("against",) if compared else ())))
    clean, corrupted, answer, *against = columns
    return Asked(clean, corrupted, answer, against[0] if against else None)


def _pair(file: Path, number: int, line: str) -> dict[str, str]:
    """What stands on a line."""
    try:
        pair: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise _refused(file, number, f"no JSON ({error.msg}, letter {error.colno}); write {_FORM}") from error
    if not isinstance(pair, dict):
        raise _refused(file, number, f"{line.strip()[:40]} is not a pair; write {_FORM}")
    for name in _NEEDED:
        if name not in pair:
            raise _refused(file, number, f'no "{name}"; write {_FORM}')
    for name, text in pair.items():
        if name not in (*_NEEDED, "against"):
            raise _refused(file, number, f'"{name}" is unknown; write {_FORM}')
        if not isinstance(text, str):
            raise _refused(file, number, f'"{name}" is {json.dumps(text)[:40]}, not a text; put it in quotes')
    return pair


def _refused(file: Path, number: int, why: str) -> typer.BadParameter:
    return typer.BadParameter(f'pairs "{file}", line {number}: {why}')
