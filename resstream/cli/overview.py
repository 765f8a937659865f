"""The commands that are not one measure: the report of several, and the list of models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from resstream.cli.options import Against, Answer, Model, Threads
from resstream.cli.steps import use
from resstream.cli.tables import Table, print_table


def report(
    model: Model = "smollm2",
    clean: Annotated[str | None, typer.Option(help="Prompt to which the answer is right.")] = None,
    corrupted: Annotated[str | None, typer.Option(help="Prompt of as many tokens to which it is wrong.")] = None,
    answer: Answer = None,
    against: Against = None,
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("resstream-report"),
    threads: Threads = None,
) -> None:
    """Measure one pair of prompts eight ways, as a page.

    Without prompts it asks about Mary, John and the store.
    """
    use(threads)
    from resstream.report import MEASURES
    from resstream.report import report as write
    from resstream.result import open_result

    given: dict[str, Any] = {"clean": clean, "corrupted": corrupted, "answer": answer, "against": against}
    page = write(model, **{name: value for name, value in given.items() if value is not None}, out=out)
    for measure in MEASURES:
        typer.echo(repr(open_result(page.with_name(f"{measure}.nc"))))
    typer.echo(f"The report is at {page.resolve()}")


def models() -> None:
    """List the bundled models, and what --model takes."""
    from resstream.models.bundled import BUNDLED

    rows = [(name, each.model, each.quantisation, each.license, each.requirement) for name, each in BUNDLED.items()]
    print_table(Table("Bundled models", ("name", "model", "weights", "licence", "comes from"), rows))
    typer.echo(
        "--model also takes a local folder (config.json and weights), a .gguf file, or the id of a causal language\n"
        'model on the Hugging Face hub, such as "gpt2". In Python, rs.load(...) takes a Hugging Face model or a\n'
        "TransformerBridge that you hold already, too."
    )
