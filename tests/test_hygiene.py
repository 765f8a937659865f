"""House rules that can be read off the source: openings, sizes, leftovers, and an example for every public name."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

PACKAGE = Path(__file__).parents[1] / "resstream"
LONGEST = 400
LEFTOVER = re.compile(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError)\b")
SENTENCE_END = re.compile(r"[.!?]\s+[A-Z]")


def violations(file: Path) -> list[str]:
    """Everything in one source file that breaks a house rule, one line each."""
    source = file.read_text(encoding="utf-8")
    lines, tree = source.splitlines(), ast.parse(source)
    opening = (ast.get_docstring(tree) or "").partition("\n\n")[0]
    found = []
    if not opening.endswith(".") or SENTENCE_END.search(opening):
        found.append(f"{file.name}:1: opens without one sentence that says what the file is for")
    if len(lines) > LONGEST:
        found.append(f"{file.name}: {len(lines)} lines, which wants to be two rooms with two names")
    for number, line in enumerate(lines, start=1):
        if leftover := LEFTOVER.search(line):
            found.append(f"{file.name}:{number}: {leftover[0]}")
    if file.parent.name != "cli":
        prints = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "print"]
        found += [f"{file.name}:{node.lineno}: print outside the command line" for node in prints]
    return found


def without_example(names: Mapping[str, object]) -> list[str]:
    """The functions and classes among some public names whose docstring shows no example; errors need none."""
    return [
        name
        for name, value in names.items()
        if (inspect.isfunction(value) or inspect.isclass(value))
        and not (inspect.isclass(value) and issubclass(value, BaseException))
        and ">>> " not in (value.__doc__ or "")
    ]


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_every_file_keeps_the_house_rules(file):
    assert violations(file) == []


def test_every_public_name_shows_an_example():
    import resstream

    assert without_example({name: getattr(resstream, name) for name in resstream.__all__}) == []


def test_every_public_name_has_a_docstring():
    import resstream

    values = {name: getattr(resstream, name) for name in resstream.__all__ if not name.startswith("__")}
    documented = {n: v for n, v in values.items() if callable(v) or isinstance(v, ModuleType)}
    assert [name for name, value in documented.items() if not inspect.getdoc(value)] == []


PLANTED = {
    "no docstring": ("import os\n", "opens without"),
    "two sentences": ('"""One thing. Another thing."""\n', "opens without"),
    "no full stop": ('"""A heading"""\n', "opens without"),
    "too long": ('"""Long."""\n' + "\n" * LONGEST, "two rooms"),
    "leftover": ('"""Ok."""\n# TO' + "DO: later\n", "TO" + "DO"),
    "stub": ('"""Ok."""\nraise NotImplemented' + "Error\n", "NotImplemented"),
    "print": ('"""Ok."""\ndef f():\n    print(1)\n', "print outside"),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_violation_is_reported(tmp_path, case):
    source, message = PLANTED[case]
    file = tmp_path / "room.py"
    file.write_text(source)
    (found,) = violations(file)
    assert message in found


def test_a_clean_file_is_not_reported(tmp_path):
    file = tmp_path / "room.py"
    file.write_text('"""Read v0.1 files: e.g. "a.b".\n\nMore prose. And more."""\nlogger.print(1)\n')
    assert violations(file) == []


def test_a_public_name_without_an_example_is_reported():
    def bare():
        """Does something."""

    def shown():
        """Do something.

        >>> shown()
        """

    class Undocumented:
        pass

    names = {"bare": bare, "shown": shown, "Undocumented": Undocumented, "ValueError": ValueError, "pi": 3.14}
    assert without_example(names) == ["bare", "Undocumented"]
