"""The two steps that every command shares: to load the model, and to show and write what was found."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from resstream.cli.tables import print_table, tables_of

if TYPE_CHECKING:
    from resstream.models.trunk import ResidualModel
    from resstream.result import Result


def use(threads: int | None) -> None:
    """Compute with so many threads from now on."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def loaded(model: str, threads: int | None) -> ResidualModel:
    """The model that a command is about."""
    use(threads)
    from resstream.models import load

    return load(model)


def watched() -> bool:
    """Whether somebody looks at a terminal, where progress bars can be drawn; they go to stderr."""
    return sys.stderr.isatty()


def show(result: Result, out: Sequence[Path] | None) -> None:
    """Print a result's headline and its tables, and write it to files."""
    from resstream.report import save

    for path in out or []:
        save(result, path)
    typer.echo(repr(result))
    for table in tables_of(result):
        print_table(table)
    for path in out or []:
        typer.echo(f"wrote {path}")
