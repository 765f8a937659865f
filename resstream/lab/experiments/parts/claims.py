"""Claims about residual connections, each with the figure that it is held against and what was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

HOLDS, AT_START, FAILS = "holds", "holds at initialisation only", "does not hold"


@dataclass(frozen=True)
class Claim:
    """One claim, and what became of it.

    >>> Claim("C7", "alpha of 100 layers", "Wang et al. 2022", "3.7606", "3.7606", HOLDS).verdict
    'holds'

    Attributes:
        row: its number in the table of claims.
        says: the claim, in a sentence.
        source: the paper that it comes from, or that it is corrected by.
        expected: the figure there.
        found: the figure here, with its interval where chance has a part.
        verdict: HOLDS, AT_START or FAILS; a claim that does not hold says why in `because`.
        because: the reason, in a sentence.
    """

    row: str
    says: str
    source: str
    expected: str
    found: str
    verdict: str
    because: str = ""


def judge(holds: bool) -> str:
    """The verdict on a claim that was tested."""
    return HOLDS if holds else FAILS


def plain(claims: Sequence[Claim]) -> list[dict[str, Any]]:
    """Claims as plain values, as the settings of a result hold them."""
    return [asdict(claim) for claim in claims]


def within(found: float, expected: float, factor: float) -> bool:
    """Whether two positive numbers differ by no more than a factor.

    >>> within(3.0, 4.0, 1.5), within(3.0, 6.0, 1.5)
    (True, False)
    """
    return found > 0 and expected / factor <= found <= expected * factor
