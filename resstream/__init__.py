"""Read, edit and expand the residual stream of Transformers: x <- x + F(x), and everything that follows from it.

>>> import resstream as rs
>>> model = rs.load("smollm2")
>>> lens = rs.logit_lens(model, "The Eiffel Tower is in the city of")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resstream import lab as lab
    from resstream import prompts as prompts
    from resstream.check import Check as Check
    from resstream.errors import EditError as EditError
    from resstream.errors import LabError as LabError
    from resstream.errors import LoadError as LoadError
    from resstream.errors import MetricError as MetricError
    from resstream.errors import PromptError as PromptError
    from resstream.errors import ResstreamError as ResstreamError
    from resstream.errors import ResultError as ResultError
    from resstream.errors import SiteError as SiteError
    from resstream.errors import UnsupportedModelError as UnsupportedModelError
    from resstream.measure.ablation import ablate_layers as ablate_layers
    from resstream.measure.comparison import compare as compare
    from resstream.measure.direct_effects import direct_effects as direct_effects
    from resstream.measure.ensemble import layer_ensemble as layer_ensemble
    from resstream.measure.gradients import attribution_patching as attribution_patching
    from resstream.measure.health import stream_health as stream_health
    from resstream.measure.lens import logit_lens as logit_lens
    from resstream.measure.lesions import lesion_curve as lesion_curve
    from resstream.measure.logit_paths import logit_by_path_length as logit_by_path_length
    from resstream.measure.metrics import Metric as Metric
    from resstream.measure.metrics import kl_from_base as kl_from_base
    from resstream.measure.metrics import log_prob as log_prob
    from resstream.measure.metrics import logit_diff as logit_diff
    from resstream.measure.metrics import loss as loss
    from resstream.measure.patching import patch_activations as patch_activations
    from resstream.measure.path_patching import path_patching as path_patching
    from resstream.measure.paths import path_lengths as path_lengths
    from resstream.models import load as load
    from resstream.models.text import Substring as Substring
    from resstream.models.tokens import PerPrompt as PerPrompt
    from resstream.models.trunk import ResidualModel as ResidualModel
    from resstream.result import Result as Result
    from resstream.result import open_result as open_result
    from resstream.stream.edited import edited as edited
    from resstream.stream.edits import Add as Add
    from resstream.stream.edits import Apply as Apply
    from resstream.stream.edits import Mean as Mean
    from resstream.stream.edits import Noise as Noise
    from resstream.stream.edits import Reorder as Reorder
    from resstream.stream.edits import Replace as Replace
    from resstream.stream.edits import Resample as Resample
    from resstream.stream.edits import Scale as Scale
    from resstream.stream.edits import Skip as Skip
    from resstream.stream.edits import Zero as Zero
    from resstream.stream.read import Stream as Stream
    from resstream.stream.read import read as read

__version__ = "0.1.0"

# Rooms that are public as a whole, such as rs.prompts.
_ROOMS = ("prompts", "lab")

# Where each public name lives, in the order of the story: load, read, edit, measure, keep. Names are imported when they
# are first used, so that importing the package costs next to nothing.
_HOMES = {
    "models": ("load",),
    "models.trunk": ("ResidualModel",),
    "models.text": ("Substring",),
    "models.tokens": ("PerPrompt",),
    "stream.read": ("read", "Stream"),
    "stream.edited": ("edited",),
    "stream.edits": ("Replace", "Add", "Scale", "Zero", "Mean", "Resample", "Noise", "Apply", "Skip", "Reorder"),
    "measure.lens": ("logit_lens",),
    "measure.patching": ("patch_activations",),
    "measure.gradients": ("attribution_patching",),
    "measure.comparison": ("compare",),
    "measure.path_patching": ("path_patching",),
    "measure.direct_effects": ("direct_effects",),
    "measure.ablation": ("ablate_layers",),
    "measure.lesions": ("lesion_curve",),
    "measure.paths": ("path_lengths",),
    "measure.logit_paths": ("logit_by_path_length",),
    "measure.ensemble": ("layer_ensemble",),
    "measure.health": ("stream_health",),
    "measure.metrics": ("logit_diff", "log_prob", "loss", "kl_from_base", "Metric"),
    "result": ("Result", "open_result"),
    "check": ("Check",),
    "errors": (
        "ResstreamError",
        "LoadError",
        "UnsupportedModelError",
        "SiteError",
        "PromptError",
        "EditError",
        "MetricError",
        "ResultError",
        "LabError",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [*_HOME_OF, *_ROOMS]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"resstream.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'resstream' has no attribute {name!r}")
    value = getattr(import_module(f"resstream.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
