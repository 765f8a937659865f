"""The commands that take parts of a model away: one at a time, more and more of them, or in every combination."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from resstream.cli.options import (
    Against,
    Answer,
    Model,
    Out,
    Prompts,
    Threads,
    counts_of,
    layers_of,
    metric_of,
    units_of,
)
from resstream.cli.steps import loaded, show, watched


def ablate(
    prompts: Prompts,
    answer: Answer = None,
    against: Against = None,
    model: Model = "smollm2",
    unit: Annotated[str, typer.Option(help='What to remove: "layer", "attn", "mlp" or "head".')] = "layer",
    how: Annotated[str, typer.Option(help='"skip", "zero", "mean" or "resample".')] = "skip",
    layers: Annotated[
        str, typer.Option(help='"each", or numbers and ranges, or heads such as 5.head.3; 3+5 goes together.')
    ] = "each",
    out: Out = None,
    threads: Threads = None,
) -> None:
    """Remove layers, and measure what the model loses.

    With one answer that is its log-probability, with two their logit difference, else the loss on the prompts.
    """
    options: dict[str, Any] = {"unit": unit, "how": how, "layers": layers_of(layers, sets=True)}
    metric = metric_of(answer, against)
    opened = loaded(model, threads)
    from resstream.measure.ablation import ablate_layers

    show(ablate_layers(opened, prompts, metric=metric, **options, progress=watched()), out)


def lesion(
    prompts: Prompts,
    how: Annotated[
        str, typer.Option(help='"delete", "shuffle", "swap", "scramble", "reverse", "parallel" or "repeat".')
    ] = "delete",
    counts: Annotated[str | None, typer.Option(help="How much of it: numbers and ranges such as 0,1,4-8.")] = None,
    model: Model = "smollm2",
    unit: Annotated[str, typer.Option(help='What is deleted or moved: "layer" or "write".')] = "layer",
    samples: Annotated[int, typer.Option(min=1, help="Draws for each count, where chance has a part.")] = 20,
    seed: Annotated[int, typer.Option(help="Which draws.")] = 0,
    out: Out = None,
    threads: Threads = None,
) -> None:
    """Delete or reorder more and more layers.

    It follows the loss on the prompts, and how far the predictions move.
    """
    options: dict[str, Any] = {"how": how, "counts": counts_of(counts), "unit": unit}
    opened = loaded(model, threads)
    from resstream.measure.lesions import lesion_curve

    show(lesion_curve(opened, prompts, **options, samples=samples, seed=seed, progress=watched()), out)


def ensemble(
    prompts: Prompts,
    answer: Answer = None,
    against: Against = None,
    model: Model = "smollm2",
    unit: Annotated[str, typer.Option(help='What is kept or removed: "layer" or "write".')] = "layer",
    units: Annotated[
        str, typer.Option(help='"each", layers such as 0,5,8-11, or writes such as 5.attn,5.mlp.')
    ] = "each",
    exact: Annotated[
        bool | None,
        typer.Option("--exact/--sampled", help="All subsets, or random orders; by default all of up to 12 units."),
    ] = None,
    how: Annotated[str, typer.Option(help='"skip", "mean" or "resample".')] = "skip",
    samples: Annotated[int, typer.Option(min=1, help="Random orders to draw, where they are sampled.")] = 200,
    seed: Annotated[int, typer.Option(help="Which orders are drawn.")] = 0,
    out: Out = None,
    threads: Threads = None,
) -> None:
    """Run the model with every choice of layers.

    What is each worth, by itself and together with others? The metric is as for ablate.
    """
    options: dict[str, Any] = {"unit": unit, "units": units_of(units, unit), "exact": exact, "how": how}
    metric = metric_of(answer, against)
    opened = loaded(model, threads)
    from resstream.measure.ensemble import layer_ensemble

    show(layer_ensemble(opened, prompts, metric, **options, samples=samples, seed=seed, progress=watched()), out)
