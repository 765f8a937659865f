"""The command line under its other name, `python -m resstream.cli`."""

from __future__ import annotations

from resstream.cli import app

app()
