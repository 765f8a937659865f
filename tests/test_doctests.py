"""Every example in a docstring runs, and prints what it says that it prints."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

PACKAGE = Path(__file__).parents[1] / "resstream"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(source: str) -> dict[str, str]:
    """The docstrings in a source file that hold examples, by name.

    They are read off the source, because doctest's own search passes over whatever a decorator has wrapped.
    """
    found: dict[str, str] = {}

    def visit(node: ast.AST, path: tuple[str, ...]) -> None:
        if isinstance(node, DOCUMENTED):
            path = (*path, getattr(node, "name", "module"))
            text = ast.get_docstring(node) or ""
            if ">>> " in text:
                found[".".join(path[1:]) or "module"] = text
        for child in ast.iter_child_nodes(node):
            visit(child, path)

    visit(ast.parse(source), ())
    return found


def module_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


EXAMPLES = {
    f"{module_of(file)}:{name}": (module_of(file), text)
    for file in sorted(PACKAGE.rglob("*.py"))
    for name, text in docstrings(file.read_text(encoding="utf-8")).items()
}


def failures(module: str, name: str, text: str) -> list[str]:
    """What an example prints where it does not print what it says."""
    names = dict(vars(importlib.import_module(module)))
    test = doctest.DocTestParser().get_doctest(text, names, name, module, 0)
    said: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=said.append)
    return said


@pytest.fixture(autouse=True)
def _figures_are_closed():
    """An example may leave its figure open, as in a notebook."""
    yield
    plt.close("all")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_what_it_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert failures(EXAMPLES[name][0], name, EXAMPLES[name][1]) == []


def test_every_public_function_has_its_example_here():
    tested = {name.partition(":")[2] for name in EXAMPLES}
    import resstream

    functions = {name for name in resstream.__all__ if inspect.isfunction(getattr(resstream, name))}
    assert functions <= tested
    assert "logit_diff" in tested
    assert "Site" in tested


PLANTED = {
    "wrong": ">>> 1 + 1\n3",
    "raises": ">>> 1 / 0",
    "missing": ">>> 1 + 1",
}


@pytest.mark.parametrize("case", PLANTED)
def test_an_example_that_is_wrong_is_noticed(case):
    """The twin of the test above."""
    assert failures("resstream.sites", case, PLANTED[case])
    assert not failures("resstream.sites", case, ">>> 1 + 1\n2\n>>> 1 / 0  # doctest: +SKIP")


def test_examples_are_found_behind_decorators():
    source = 'class A:\n    @f\n    def b(self):\n        """Do.\n\n        >>> 1\n        1\n        """\n'
    assert docstrings(source) == {"A.b": "Do.\n\n>>> 1\n1"}
