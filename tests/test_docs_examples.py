"""Examples in docstrings reach the reference page as code."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "docs" / "examples_as_code.py"


def test_an_example_gets_a_fence_up_to_the_next_blank_line_and_other_text_stays():
    spec = importlib.util.spec_from_file_location("examples_as_code", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = "Add.\n\n    >>> 1 + 1\n    2\n\n    More.\n\n    >>> 2 + 2\n    4"
    fenced = "Add.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore.\n\n```pycon\n>>> 2 + 2\n4\n```"
    assert module.fenced(text) == fenced
    assert module.fenced("Nothing to run.") == "Nothing to run."
