"""The import table: which room of the package may import which, and that only stream/ and models/ touch hooks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "resstream"

# From the ground up. A file that fits no row is a finding too: a new room wants a decision about what it may import.
GROUND = {"errors", "sites", "check"}
TRUNK = GROUND | {"models.text", "models.tokens", "models.left_context", "models.carry", "models.trunk"}
MEASURE = TRUNK | {"result", "stream", "measure.metrics", "measure.answers", "measure.labels"}
# Parts that measures share, no measures themselves: folders, each for one family of measures, and intervals for all.
SHARED = ("patches", "removals", "path_sums", "vitals", "intervals")
PARTS = {f"measure.{room}" for room in SHARED}
EVERYTHING = MEASURE | {"plots", "models", "models.bundled", "measure", "lab", "lab.experiments", "prompts", "package"}
MAY_IMPORT = {
    "errors": set(),
    "sites": {"errors"},
    "check": {"errors"},
    "result": GROUND,
    "plots": GROUND | {"result", "plots"},
    "models.text": GROUND,
    "models.tokens": GROUND | {"models.text"},
    "models.left_context": GROUND | {"models.tokens"},
    "models.carry": set(),
    "models.trunk": GROUND | {"models.tokens", "models.left_context", "models.carry"},
    "models.bundled": {"errors", "sites", "models.trunk"},
    "models.frozen": set(),
    "models": TRUNK | {"models", "models.frozen"},
    "models.__init__": TRUNK | {"models", "models.bundled"},
    "stream": TRUNK | {"stream"},
    "prompts": TRUNK | {"measure.metrics", "prompts"},
    "measure": MEASURE | PARTS,
    "measure.metrics": MEASURE,
    "measure.labels": TRUNK,
    "measure.answers": TRUNK,
    "measure.intervals": set(),
    "measure.patches": MEASURE | {"measure.intervals", "measure.patches"},
    "measure.removals": TRUNK | {"stream", "measure.labels", "measure.intervals", "measure.removals"},
    "measure.path_sums": TRUNK | {"stream", "measure.labels", "measure.intervals", "measure.path_sums"},
    "measure.vitals": TRUNK | {"stream", "measure.labels", "measure.metrics", "measure.vitals"},
    "measure.__init__": MEASURE | {"measure"},
    "lab": TRUNK | {"models.frozen", "lab"},
    "lab.__init__": {"models.carry", "lab", "lab.experiments"},
    "lab.experiments": MEASURE | PARTS | {"measure", "models", "lab", "lab.experiments"},
    "report": EVERYTHING,
    "sweep": EVERYTHING,
    "cli": EVERYTHING | {"report", "sweep", "cli"},
}
OWN_ROOMS = {
    "models": {"text", "tokens", "left_context", "carry", "frozen", "trunk", "bundled", "__init__"},
    "measure": {"metrics", "answers", "labels", "__init__", *SHARED},
    "lab": {"experiments", "__init__"},
}
NEVER_TORCH = GROUND | {"result", "plots"}
TORCH = {"torch", "transformers", "transformer_lens"}
EXCEPTIONS = {("result", "Result.plot", "plots")}  # a result knows how to draw itself, and imports plots to do it
HOOKED = {"stream", "models"}
HOOK_CALL = re.compile(r"register_\w*hook|add_\w*hook|run_with_hooks")


@dataclass(frozen=True)
class Import:
    """One import: of which module, at which line, inside which function."""

    target: str
    line: int
    scope: str


def room_of(module: str, *, importing: bool) -> str:
    """The room of a dotted module name; a folder's __init__ is a room of its own only where it does the importing."""
    parts = module.split(".")[1:]
    if not parts or parts == ["__init__"]:
        return "package"
    folder, file = parts[0], parts[1] if len(parts) > 1 else "__init__"
    if file == "__init__" and not importing:
        return folder
    return f"{folder}.{file}" if file in OWN_ROOMS.get(folder, ()) else folder


def modules_of(package: Path) -> dict[str, Path]:
    """Every module of a package by its dotted name, `pkg.folder.__init__` for a folder."""
    root = package.parent
    return {".".join(path.relative_to(root).with_suffix("").parts): path for path in sorted(package.rglob("*.py"))}


def imports_of(name: str, tree: ast.AST, known: set[str]) -> Iterator[Import]:
    """All imports of a module, at any depth, relative ones resolved; `from a import b` is a.b if that is a module."""

    def visit(node: ast.AST, scope: tuple[str, ...]) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            yield from targets(child, ".".join(scope))
            yield from visit(child, (*scope, child.name) if named else scope)

    def targets(node: ast.AST, scope: str) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, scope) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = name.split(".")[: -node.level] if node.level else []
            base = ".".join([*parent, *([node.module] if node.module else [])])
            deeper = [f"{base}.{alias.name}" for alias in node.names]
            found = [path if {path, f"{path}.__init__"} & known else base for path in deeper]
            yield from (Import(target, node.lineno, scope) for target in dict.fromkeys(found))
        elif isinstance(node, ast.Call) and _called(node) in {"import_module", "__import__"}:
            yield from (Import(str(a.value), node.lineno, scope) for a in node.args[:1] if isinstance(a, ast.Constant))

    yield from visit(tree, ())


def hooks_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every place where a module registers a hook or replaces a `forward`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            replaces = node.attr == "forward" and isinstance(node.ctx, ast.Store | ast.Del)
            if replaces or HOOK_CALL.fullmatch(node.attr):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and _called(node) in {"setattr", "delattr"}:
            named = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            yield from ((node.lineno, "forward") for name in named if name == "forward")


def violations(package: Path) -> list[str]:
    """Everything in a package that breaks the table, one line each."""
    modules = modules_of(package)
    found = []
    for name, path in modules.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        room, file = room_of(name, importing=True), path.relative_to(package.parent).as_posix()
        if room not in {*MAY_IMPORT, "package"}:
            found.append(f"{file}: no row in the table says what {room} may import")
            continue
        for item in imports_of(name, tree, set(modules)):
            place, top = f"{file}:{item.line}", item.target.partition(".")[0]
            if room in NEVER_TORCH and top in TORCH:
                found.append(f"{place}: {room} may never import {top}")
            if top != package.name or room == "package" or item.target == name:
                continue
            target = room_of(item.target, importing=False)
            if target not in MAY_IMPORT[room] and (room, item.scope, target) not in EXCEPTIONS:
                found.append(f"{place}: {room} may not import {target} ({item.target})")
        if path.relative_to(package).parts[0] not in HOOKED:
            found += [f"{file}:{line}: only stream/ and models/ may touch hooks ({it})" for line, it in hooks_of(tree)]
    return found


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def test_every_import_of_the_package_is_in_the_table():
    assert violations(PACKAGE) == []


PLANTED = {
    "result draws at module level": ("result.py", "import resstream.plots", "result may not import plots"),
    "result uses torch": ("result.py", "from torch import Tensor", "result may never import torch"),
    "plots uses torch in a function": (
        "plots/lens.py",
        "def f():\n    import torch.nn",
        "plots may never import torch",
    ),
    "trunk knows an architecture": ("models/trunk.py", "from . import causal_lm", "models.trunk may not import models"),
    "left context knows a trunk": ("models/left_context.py", "from . import trunk", "may not import models.trunk"),
    "bundled loads": ("models/bundled.py", "from resstream.models import load", "models.bundled may not import models"),
    "stream measures": ("stream/run.py", "from resstream.measure import metrics", "may not import measure.metrics"),
    "stream loads": ("stream/run.py", "from resstream.models import load", "stream may not import models"),
    "a measure uses another": ("measure/lens.py", "from .patching import f", "measure may not import measure "),
    "a measure uses another, by the folder": ("measure/lens.py", "from . import patching", "may not import measure "),
    "a plot measures": ("plots/lens.py", "from resstream.measure import lens", "plots may not import measure "),
    "a measure draws, by name": ("measure/lens.py", "import_module('resstream.plots')", "measure may not import plots"),
    "subsets know a measure": (
        "measure/removals/subsets.py",
        "from resstream.measure import lens",
        "measure.removals may not import measure ",
    ),
    "a report counts subsets": (
        "report.py",
        "from resstream.measure.removals import subsets",
        "not import measure.removals",
    ),
    "a measure goes through the front door": ("measure/lens.py", "import resstream", "measure may not import package"),
    "a toy net measures": ("lab/nets.py", "from resstream.measure import lens", "lab may not import measure"),
    "a toy net experiments": ("lab/nets.py", "from resstream.lab import experiments", "may not import lab.experiments"),
    "a measure freezes": ("measure/lens.py", "from resstream.models.frozen import f", "may not import models.frozen"),
    "prompts know results": ("prompts.py", "from resstream.result import Result", "prompts may not import result"),
    "a report uses the command line": ("report.py", "from resstream.cli import app", "report may not import cli"),
    "a room without a row": ("utils.py", "", "no row in the table says what utils may import"),
    "a measure registers a hook": ("measure/lens.py", "m.register_forward_hook(f)", "may touch hooks"),
    "the lab adds a bridge hook": ("lab/nets.py", "m.add_hook('x', f)", "may touch hooks"),
    "a measure replaces forward": ("measure/lens.py", "m.forward = f", "may touch hooks"),
    "a measure replaces forward by name": ("measure/lens.py", "setattr(m, 'forward', f)", "may touch hooks"),
    "the package registers a hook": ("__init__.py", "m.register_full_backward_hook(f)", "may touch hooks"),
}
ALLOWED = {
    "result.py": "class Result:\n    def plot(self):\n        from resstream import plots",
    "measure/lens.py": "from resstream.measure import metrics\nfrom resstream.stream.run import run",
    "measure/ensemble.py": "from .removals.removal import f\nfrom resstream.measure.removals.subsets import g",
    "measure/removals/removal.py": "from resstream.stream.run import run\nfrom ..labels import to_numpy",
    "measure/removals/subsets.py": "import numpy",
    "measure/patching.py": "from .metrics import loss\nfrom resstream.models.trunk import ResidualModel",
    "measure/metrics.py": "import torch",
    "lab/__init__.py": "from resstream.lab import experiments",
    "lab/nets.py": "from resstream.models.frozen import f\ndef forward(self): ...",
    "lab/experiments.py": "from resstream.measure.lens import f\nfrom resstream.lab import nets",
    "models/__init__.py": "from resstream.models.bundled import obtain\nfrom . import causal_lm",
    "models/causal_lm.py": "m.register_forward_hook(f)\nm.forward = f",
    "models/trunk.py": "from resstream.models.left_context import LeftContext",
    "models/left_context.py": "from resstream.models.tokens import Tokens",
    "models/bundled.py": "",
    "stream/run.py": "from . import edits",
    "stream/edits.py": "from resstream.sites import Site",
    "plots/__init__.py": "from resstream.plots.lens import draw_lens",
    "plots/lens.py": "from resstream.result import Result",
    "sites.py": "from resstream.errors import SiteError",
    "errors.py": "",
    "prompts.py": "",
    "cli/__init__.py": "import resstream as rs\nfrom resstream.cli.steps import show",
    "cli/steps.py": "from .tables import tables_of\nfrom resstream.report import report",
    "cli/tables.py": "from resstream.plots.canvas import visible",
    "report.py": "from resstream.plots import draw",
    "__init__.py": "from resstream.cli import app\nimport torch",
}


@pytest.fixture
def package(tmp_path):
    """A small package of the same shape, with nothing wrong in it."""
    for file, source in ALLOWED.items():
        path = tmp_path / "resstream" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return tmp_path / "resstream"


def test_what_the_table_allows_is_not_reported(package):
    assert violations(package) == []


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_violation_is_reported(package, case):
    file, source, message = PLANTED[case]
    (package / file).write_text(source)
    (found,) = violations(package)
    assert message in found
    assert file in found


def test_the_exception_for_plot_covers_that_method_alone(package):
    (package / "result.py").write_text("class Result:\n    def show(self):\n        from resstream import plots")
    (found,) = violations(package)
    assert "result may not import plots" in found
