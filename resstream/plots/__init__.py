"""Pictures: a result in, matplotlib Axes out, one drawing function a measure.

>>> import resstream as rs
>>> lens = rs.logit_lens(rs.load("smollm2"), "The Eiffel Tower is in the city of")
>>> lens.plot(variable="entropy").get_ylabel()
'layer (resid_post)'
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from resstream.errors import ResultError, listed
from resstream.plots.ablation import draw_ablation
from resstream.plots.canvas import Place
from resstream.plots.comparison import draw_comparison
from resstream.plots.ensemble import draw_ensemble
from resstream.plots.experiments import draw_experiment
from resstream.plots.health import draw_health
from resstream.plots.lens import draw_lens
from resstream.plots.lesions import draw_lesions
from resstream.plots.logit_paths import draw_logit_paths
from resstream.plots.patching import draw_patching
from resstream.plots.path_patching import draw_path_patching
from resstream.plots.paths import draw_paths
from resstream.result import Result

_DRAWINGS: dict[str, Callable[..., Axes]] = {
    "logit_lens": draw_lens,
    "patch_activations": draw_patching,
    "attribution_patching": draw_patching,
    "compare": draw_comparison,
    "path_patching": draw_path_patching,
    "direct_effects": draw_path_patching,
    "ablate_layers": draw_ablation,
    "lesion_curve": draw_lesions,
    "path_lengths": draw_paths,
    "logit_by_path_length": draw_logit_paths,
    "layer_ensemble": draw_ensemble,
    "stream_health": draw_health,
}


def draw(result: Result, ax: Axes | None = None, **options: Any) -> Axes:
    """Draw a result; `result.plot(...)` is the same.

    Args:
        result: what a measure returned.
        ax: where to draw; by default a new figure of pyplot's, which a notebook shows, sized to what is drawn.
        **options: `prompt` for any measure; for `logit_lens` `variable` and `show`; for `patch_activations` and
            `attribution_patching` `site`, `metric`, `panel` and `show`; for `path_patching` and `direct_effects`
            `receiver` and `show`; for `lesion_curve` and experiments of the lab `show`; for `path_lengths`,
            `layer_ensemble` and `stream_health` `panel`.
    Returns:
        The Axes that were drawn on; `.figure` is theirs.
    Raises:
        ResultError: no picture for this measure, an option that it does not have, or a value that does not exist.
    """
    drawing = _drawing_of(result, options)
    if ax is not None:
        return drawing(Place(ax=ax), result, **options)
    # Imported late, since pyplot chooses a window system, which files do not need.
    import matplotlib.pyplot as plt

    figure = plt.figure(layout="constrained")
    try:
        return drawing(Place(figure=figure), result, **options)
    except BaseException:
        plt.close(figure)
        raise


def save_picture(result: Result, target: str | Path, *, dpi: int = 150, **options: Any) -> None:
    """Draw a result into a file, without pyplot: no window, and nothing to close.

    Args:
        result: what a measure returned.
        target: a path whose suffix says the format: .png, .pdf or .svg.
        dpi: dots an inch.
        **options: as for `draw`.
    Raises:
        ResultError: as for `draw`.
    """
    drawing = _drawing_of(result, options)
    figure = Figure(layout="constrained")
    drawing(Place(figure=figure), result, **options)
    figure.savefig(target, dpi=dpi)


def _drawing_of(result: Result, options: dict[str, Any]) -> Callable[..., Axes]:
    if result.measure.startswith("lab."):
        return _known(draw_experiment, result, options)
    if result.measure not in _DRAWINGS:
        raise ResultError(
            f'there is no picture of "{result.measure}": pictures exist of {listed(_DRAWINGS)}; '
            "use result.data or result.to_dataframe()"
        )
    return _known(_DRAWINGS[result.measure], result, options)


def _known(drawing: Callable[..., Axes], result: Result, options: dict[str, Any]) -> Callable[..., Axes]:
    """A drawing, if it has all the options that were asked for."""
    known = [name for name, each in inspect.signature(drawing).parameters.items() if each.kind is each.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            raise ResultError(f'the picture of {result.measure} has no option "{name}": it takes {listed(known)}')
    return drawing
