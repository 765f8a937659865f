"""The certificate that a number carries: what was compared, how far apart the two were, and how far they may be."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One identity, measured.

    >>> Check("pre + attn + mlp = post", error=3e-8, tolerance=1e-5)
    pre + attn + mlp = post: 3e-08 (ok)

    Attributes:
        name: the identity, in words.
        error: how far its two sides are apart; relative, unless the name says otherwise.
        tolerance: how far they may be apart.
        where: the place with the largest error, when it has one.
    """

    name: str
    error: float
    tolerance: float
    where: str = ""

    @property
    def passed(self) -> bool:
        """Whether the identity holds; an error that is not a number has not passed."""
        return math.isfinite(self.error) and self.error <= self.tolerance

    def __repr__(self) -> str:
        verdict = "ok" if self.passed else f"FAILED, allowed {self.tolerance:.0e}"
        place = f" at {self.where}" if self.where and not self.passed else ""
        return f"{self.name}: {self.error:.2g}{place} ({verdict})"
