"""The errors that resstream raises: each says what was asked for, what was found, and what to type instead."""

from __future__ import annotations


class ResstreamError(Exception):
    """Base of every error that resstream raises on purpose."""


class LoadError(ResstreamError):
    """A model could not be found, downloaded, converted or read."""


class UnsupportedModelError(ResstreamError):
    """The model's trunk is not a sum of residual writes, so its stream cannot be read exactly."""


class SiteError(ResstreamError):
    """A place on the residual stream that the model does not have."""


class PromptError(ResstreamError):
    """A prompt that cannot be run as asked: empty, too long, or misaligned with its partner."""


class MetricError(ResstreamError):
    """A metric that cannot be computed as asked, such as an answer of several tokens."""


class EditError(ResstreamError):
    """An edit whose value does not fit the place it is meant for."""


class ResultError(ResstreamError):
    """A result file that cannot be read, or a result that cannot be drawn."""


class LabError(ResstreamError):
    """A toy net, a residual rule or an experiment that cannot be built or run as asked."""


def listed(names: object, limit: int = 8) -> str:
    """Spell a few names for an error message, and say how many were left out.

    >>> listed(["a", "b"])
    "'a', 'b'"
    >>> listed(range(5), limit=2)
    '0, 1, ... (5 in all)'
    """
    items = [repr(name) for name in names]  # type: ignore[attr-defined]
    return ", ".join(items) if len(items) <= limit else f"{', '.join(items[:limit])}, ... ({len(items)} in all)"
