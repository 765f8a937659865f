"""The command that examines a model's stream, and names the pitfalls that it finds."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from resstream.cli.options import Model, Out, Prompts, Threads
from resstream.cli.steps import loaded, show, watched


def health(
    prompts: Prompts,
    model: Model = "smollm2",
    gradients: Annotated[bool, typer.Option(help="Take the gradient of the loss in every layer.")] = True,
    precision: Annotated[
        list[str] | None,
        typer.Option(help='Type to try: "bfloat16" (the default), "float16"; repeat it for both, "none" for neither.'),
    ] = None,
    out: Out = None,
    threads: Threads = None,
) -> None:
    """Look for the pitfalls of residual networks.

    Sizes, writes, ranks, attention, gradient and precision, layer by layer. A few hundred tokens of text are best.
    """
    chosen = precision or ["bfloat16"]
    options: dict[str, Any] = {"gradients": gradients, "precision": [each for each in chosen if each != "none"]}
    opened = loaded(model, threads)
    from resstream.measure.health import stream_health

    show(stream_health(opened, prompts, **options, progress=watched()), out)
