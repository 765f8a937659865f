"""The command line: load a model, run one measure, print its headline, and save or draw what came back."""

from __future__ import annotations

from collections.abc import Callable

from resstream.cli.expanding import logit_paths, paths
from resstream.cli.group import app, example
from resstream.cli.health import health
from resstream.cli.lab import lab
from resstream.cli.overview import models, report
from resstream.cli.patching import patch
from resstream.cli.reading import lens
from resstream.cli.removing import ablate, ensemble, lesion

__all__ = ["app"]

# Every command, in the order in which they are listed, with the example that ends its help page.
_COMMANDS: dict[Callable[..., None], tuple[str, ...]] = {
    report: ("resstream report --out my-report",),
    lens: ("resstream lens 'The Eiffel Tower is in the city of' --answer ' Paris' --out lens.png",),
    patch: (
        "resstream patch 'When Mary and John left, John gave a book to' \\",
        "    'When Mary and John left, Mary gave a book to' \\",
        "    --answer ' Mary' --against ' John' --out patch.png",
    ),
    ablate: ("resstream ablate 'The Eiffel Tower is in the city of' --answer ' Paris' --out ablate.png",),
    lesion: ("resstream lesion 'The Eiffel Tower is in the city of Paris.' --how shuffle --out lesion.png",),
    ensemble: ("resstream ensemble 'The Eiffel Tower is in the city of' --answer ' Paris' --units 20-29",),
    paths: ("resstream paths 'The Eiffel Tower is in the city of' --answer ' Paris' --start 20",),
    logit_paths: (
        "resstream logit-paths 'The Eiffel Tower is in the city of' \\",
        "    --answer ' Paris' --against ' Rome' --out logit.png",
    ),
    lab: ("resstream lab gradient_fan --short --out fan.png",),
    health: ("resstream health 'The Eiffel Tower is in the city of Paris, in France.' --out health.png",),
    models: ("resstream models",),
}
for _command, _lines in _COMMANDS.items():
    app.command(epilog=example(*_lines))(_command)
