"""The commands that read the stream and move its states: the logit lens and activation patching."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from resstream.cli.options import (
    Against,
    Answer,
    Layers,
    Model,
    Out,
    Prompts,
    RightAnswer,
    Threads,
    layers_of,
    metric_of,
    site_option,
)
from resstream.cli.steps import loaded, show, watched


def lens(
    prompts: Prompts,
    model: Model = "smollm2",
    site: Annotated[list[str] | None, site_option("Site to decode", "resid_post")] = None,
    answer: Answer = None,
    top: Annotated[int, typer.Option(min=1, help="How many of the best tokens to keep.")] = 5,
    out: Out = None,
    threads: Threads = None,
) -> None:
    """Decode the stream at every layer.

    What would the model say if it stopped there?
    """
    opened = loaded(model, threads)
    from resstream.measure.lens import logit_lens

    options: dict[str, Any] = {"sites": site or "resid_post", "targets": answer, "top_k": top}
    show(logit_lens(opened, prompts, **options, progress=watched()), out)


def patch(
    clean: Annotated[str, typer.Argument(help="Prompt to which the answer is right.", show_default=False)],
    corrupted: Annotated[str, typer.Argument(help="Prompt of as many tokens.", show_default=False)],
    answer: RightAnswer,
    against: Against = None,
    model: Model = "smollm2",
    site: Annotated[list[str] | None, site_option("Kind of place", "resid_pre")] = None,
    direction: Annotated[str, typer.Option(help='"denoise" or "noise".')] = "denoise",
    layers: Layers = "each",
    out: Out = None,
    threads: Threads = None,
) -> None:
    """Move activations from one run into another.

    Where is the answer decided?
    """
    options: dict[str, Any] = {"sites": site or "resid_pre", "direction": direction, "layers": layers_of(layers)}
    metric = metric_of(answer, against)
    opened = loaded(model, threads)
    from resstream.measure.patching import patch_activations

    show(patch_activations(opened, clean, corrupted, metric, **options, progress=watched()), out)
