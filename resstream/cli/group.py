"""The group that all commands belong to: its own options, and one message for each error and warning."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from resstream.errors import ResstreamError

# Everything else is imported where it is used: `resstream --help` answers at once, without torch.


class _Commands(TyperGroup):
    """The group of commands, which turns resstream's own errors into one message each."""

    def invoke(self, ctx: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            # A console of few letters shows "?" for the others; files are always UTF-8.
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")
        try:
            with warnings.catch_warnings():
                warnings.showwarning = lambda message, *_, **__: typer.echo(f"warning: {message}", err=True)
                return super().invoke(ctx)
        except ResstreamError as error:
            typer.echo(f"{type(error).__name__}: {error}", err=True)
            raise typer.Exit(2) from error


def example(*lines: str) -> str:
    """The end of a help page; the sign in front keeps its lines as they are."""
    return "\b\nExample:\n  " + "\n  ".join(lines)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Read, edit and expand the residual stream of Transformers.",
    epilog=example("resstream report --out my-report"),
)


def _version(asked: bool) -> bool:
    if asked:
        from resstream import __version__

        typer.echo(f"resstream {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass
