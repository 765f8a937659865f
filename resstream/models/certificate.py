"""A verified model's certificate, kept beside weights that never change, so that a second load can rely on it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from resstream.check import Check


@dataclass(frozen=True)
class Certificate:
    """What one verification found out.

    Attributes:
        check: the identity and its measured error.
        returns: for each class of block and branch, how many values it returns, and in what (None: a bare tensor).
        reuses_left: whether a suffix with its left context computes what the full width does.
    """

    check: Check
    returns: dict[str, tuple[str, int] | None]
    reuses_left: bool


def recall(folder: Path, *settings: Any) -> Certificate | None:
    """The certificate of these very weights under these very library versions, if one was kept."""
    try:
        kept = json.loads(_place(folder, settings).read_text(encoding="utf-8"))
        returns = {name: None if form is None else (form[0], form[1]) for name, form in kept["returns"].items()}
        return Certificate(Check(**kept["check"]), returns, kept["reuses_left"] is True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # none was kept, or something else wrote there


def keep(certificate: Certificate, folder: Path, *settings: Any) -> None:
    """Keep a certificate that passed; a folder that cannot be written only means proving it again next time."""
    place = _place(folder, settings)
    draft = place.with_suffix(f".{os.getpid()}.tmp")
    try:
        draft.write_text(json.dumps(asdict(certificate)), encoding="utf-8")
        os.replace(draft, place)
    except OSError:
        draft.unlink(missing_ok=True)


def _place(folder: Path, settings: tuple[Any, ...]) -> Path:
    """A file name that changes with the weights, the configuration, the libraries and the settings."""
    libraries = [version(name) for name in ("torch", "transformers", "transformer-lens", "resstream")]
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("config.json")])
    model = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    fingerprint = sha256(repr((libraries, model, settings)).encode()).hexdigest()[:16]
    return folder / f"verified-{fingerprint}.json"
