"""A griffe extension: examples in docstrings are shown as code, where Markdown would take ">>>" for quotations."""

from __future__ import annotations

import inspect
from typing import Any

import griffe


class ExamplesAsCode(griffe.Extension):
    """Puts a fence around each example, up to the next blank line."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one function, class or module."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """A docstring with a fence around each example."""
    lines: list[str] = []
    inside = False
    for line in [*inspect.cleandoc(text).splitlines(), ""]:
        if not inside and line.startswith(">>>"):
            inside = True
            lines.append("```pycon")
        elif inside and not line.strip():
            inside = False
            lines.append("```")
        lines.append(line)
    return "\n".join(lines).rstrip()
