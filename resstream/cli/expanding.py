"""The commands that expand a model into paths: a gradient by their length, and a logit."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from resstream.cli.options import Against, Answer, Model, Out, Prompts, RightAnswer, Threads, metric_of, positions_of
from resstream.cli.steps import loaded, show, watched


def paths(
    prompts: Prompts,
    answer: Answer = None,
    against: Against = None,
    model: Model = "smollm2",
    unit: Annotated[str, typer.Option(help='What counts as a hop: "write" or "layer".')] = "write",
    start: Annotated[int, typer.Option(help="Layer at whose input the gradient is taken.")] = 0,
    positions: Annotated[
        str | None, typer.Option(help="Where it is looked at: one as in -1, several as in 0,3, or a range as in 1:.")
    ] = None,
    by_branch: Annotated[
        bool, typer.Option("--by-branch", help="Split by attention and MLP hops, too; takes ten times as long.")
    ] = False,
    samples: Annotated[int, typer.Option(min=0, help="Single paths to draw for each length.")] = 64,
    signs: Annotated[int, typer.Option(min=0, help="Programs with random signs to run, for the rms of paths.")] = 8,
    seed: Annotated[int, typer.Option(help="Which paths and signs are drawn.")] = 0,
    out: Out = None,
    threads: Threads = None,
) -> None:
    """Split a gradient by the length of its paths.

    It is the gradient of an answer's log-probability, of the logit difference of two, else of the loss on the prompts.
    """
    options: dict[str, Any] = {"unit": unit, "start": start, "positions": positions_of(positions)}
    options |= {"by_branch": by_branch, "samples": samples, "signs": signs, "seed": seed}
    metric = metric_of(answer, against)
    opened = loaded(model, threads)
    from resstream.measure.paths import path_lengths

    show(path_lengths(opened, prompts, metric, **options, progress=watched()), out)


def logit_paths(
    prompts: Prompts,
    answer: RightAnswer,
    against: Against = None,
    gauge: Annotated[str, typer.Option(help='"frozen", "jacobian" or "direct".')] = "frozen",
    model: Model = "smollm2",
    out: Out = None,
    threads: Threads = None,
) -> None:
    """Split a logit by the length of forward paths.

    With two answers it is their logit difference. The gauge says which linear map stands in for a branch.
    """
    opened = loaded(model, threads)
    from resstream.measure.logit_paths import logit_by_path_length

    options: dict[str, Any] = {"gauge": gauge}
    show(logit_by_path_length(opened, prompts, answer, against, **options, progress=watched()), out)
