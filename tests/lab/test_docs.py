"""The page on the lab: its code runs, prints what it says, and its table holds every rule."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

from resstream import lab

PAGE = (Path(__file__).parents[2] / "docs" / "lab.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(python|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def said_otherwise(page: str) -> list[str]:
    """What the blocks of a page print, run one after the other, where it is not what the page says."""
    names: dict[str, object] = {"__name__": "page"}
    said: list[str] = []
    for kind, code in BLOCK.findall(page):
        if kind == "python":
            exec(code, names)
        else:
            test = doctest.DocTestParser().get_doctest(code, names, "page", None, 0)
            doctest.DocTestRunner(optionflags=FLAGS).run(test, out=said.append, clear_globs=False)
            names.update(test.globs)
    return said


def test_the_code_of_the_page_prints_what_it_says():
    assert said_otherwise(PAGE) == []
    assert len(BLOCK.findall(PAGE)) >= 6


def test_a_page_that_says_another_thing_is_noticed():
    assert said_otherwise(PAGE.replace("(True, 4)", "(True, 5)")) != []


def test_every_public_name_shows_an_example():
    named = {name: getattr(lab, name) for name in lab.__all__}
    shown = [name for name, value in named.items() if ">>> " not in (value.__doc__ or "") and callable(value)]
    assert shown == []


def test_the_table_has_every_rule():
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == list(lab.RULES)
