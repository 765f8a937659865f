"""The command that moves activations from one run into another, or estimates what that would do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from resstream.cli.options import (
    Against,
    Answer,
    Layers,
    Model,
    Out,
    Threads,
    layers_of,
    metric_of,
    parts_of,
    places_of,
)
from resstream.cli.pairs import asked_of
from resstream.cli.steps import loaded, show, watched


def patch(
    clean: Annotated[
        str | None, typer.Argument(help="Prompt to which the answer is right.", show_default=False)
    ] = None,
    corrupted: Annotated[str | None, typer.Argument(help="Prompt of as many tokens.", show_default=False)] = None,
    answer: Answer = None,
    against: Against = None,
    pairs: Annotated[
        Path | None,
        typer.Option(help="Several pairs: a file with clean, corrupted, answer, against as JSON on each line."),
    ] = None,
    model: Model = "smollm2",
    sites: Annotated[
        list[str] | None,
        typer.Option(
            "--site",
            "--sites",
            help='Kind of place, by default resid_pre; of single heads "head", "z", "q", "k", "v" or "pattern"; '
            '"neuron"; repeat the option for several.',
        ),
    ] = None,
    positions: Annotated[
        list[str] | None,
        typer.Option(
            help='"each" alone, "all" at once, "last", an index, or a piece of the clean prompt; repeat it for several.'
        ),
    ] = None,
    heads: Annotated[str, typer.Option(help='"each" alone, "all" at once, or numbers such as 0,3-5.')] = "each",
    neurons: Annotated[str, typer.Option(help='"all" at once, "each" alone, or numbers such as 0,3-5.')] = "all",
    direction: Annotated[str, typer.Option(help='"denoise" or "noise".')] = "denoise",
    layers: Layers = "each",
    window: Annotated[int | None, typer.Option(min=1, help="How many layers are patched together.")] = None,
    estimate: Annotated[bool, typer.Option("--estimate", help="Estimate by gradients rather than patch.")] = False,
    steps: Annotated[int | None, typer.Option(min=1, help="With --estimate: points to take gradients at.")] = None,
    fix: Annotated[
        list[str] | None, typer.Option(help='With --estimate: "qk" or "drop"; repeat the option for both.')
    ] = None,
    out: Out = None,
    threads: Threads = None,
) -> None:
    """Move activations from one run into another.

    Where is the answer decided?
    """
    asked = asked_of(clean, corrupted, answer, against, pairs)
    options: dict[str, Any] = {"sites": sites or "resid_pre", "direction": direction, "layers": layers_of(layers)}
    options |= {"positions": places_of(positions), "heads": parts_of(heads, "head")}
    options |= {"neurons": parts_of(neurons, "neuron")}
    options |= _manner(estimate, window, {"steps": steps, "fix": fix})
    metric = metric_of(asked.answer, asked.against)
    opened = loaded(model, threads)
    from resstream.measure.gradients import attribution_patching
    from resstream.measure.patching import patch_activations

    measure = attribution_patching if estimate else patch_activations
    show(measure(opened, asked.clean, asked.corrupted, metric, **options, progress=watched()), out)


def _manner(estimate: bool, window: int | None, estimating: dict[str, Any]) -> dict[str, Any]:
    """The options of the one measure or the other, as far as they were given."""
    if estimate and window is not None:
        raise typer.BadParameter("--window patches layers together, which has no estimate; leave out one of the two")
    given = {name: value for name, value in estimating.items() if value is not None}
    if given and not estimate:
        raise typer.BadParameter(f"--{next(iter(given))} is about estimates; give --estimate, too")
    return given if window is None else {"window": window}
