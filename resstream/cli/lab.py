"""The command for the lab: list its experiments, or run one and say what became of its claims."""

from __future__ import annotations

from inspect import signature
from typing import Annotated

import typer

from resstream.cli.options import Out, Threads
from resstream.cli.steps import show, use, watched
from resstream.cli.tables import Table, print_table
from resstream.errors import LabError


def lab(
    name: Annotated[str | None, typer.Argument(help="The experiment; leave it out to list them all.")] = None,
    short: Annotated[bool, typer.Option("--short", help="A form that takes seconds, for a first look.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of nets to draw, where chance has a part.")] = None,
    out: Out = None,
    threads: Threads = None,
) -> None:
    """Run a classic experiment on toy nets.

    Each says what it found of the claims that are made about residual connections.
    """
    use(threads)
    from resstream.lab.experiments import EXPERIMENTS, experiment

    if name is None:
        rows = [(known, ", ".join(each.rows), each.question) for known, each in EXPERIMENTS.items()]
        print_table(Table("Experiments of the lab: resstream lab NAME", ("name", "claims", "asks"), rows))
        return
    chosen = experiment(name)
    options = {**(chosen.short if short else {}), **({} if seeds is None else {"seeds": seeds})}
    if seeds is not None and "seeds" not in signature(chosen.run).parameters:
        raise LabError(f'"{name}" draws no nets, so it has no seeds; leave --seeds out')
    show(chosen.run(**options, progress=watched()), out)
