"""The command that reads the stream: the logit lens."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from resstream.cli.options import Answer, Model, Out, Prompts, Threads, site_option
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
