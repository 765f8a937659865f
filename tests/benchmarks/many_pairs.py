"""32 pairs of prompts, of four lengths, each pair with an answer of its own."""

from __future__ import annotations

import resstream as rs

_NAMES = [("Mary", "John"), ("Tom", "Anna"), ("James", "Lisa"), ("Paul", "Kate")]
_PLACES = [
    "When {} and {} met, {} gave a drink to",
    "When {} and {} went to the store, {} gave a drink to",
    "Then {} and {} had a long talk in the old park, and after that {} gave a book to",
    "Last summer {} and {} had a lot of fun at the school by the sea, and on the way home {} handed a ball to",
]
_PAIRS = [(place, *names) for names in [*_NAMES, *(names[::-1] for names in _NAMES)] for place in _PLACES]

CLEAN = [place.format(right, wrong, wrong) for place, right, wrong in _PAIRS]
CORRUPTED = [place.format(right, wrong, right) for place, right, wrong in _PAIRS]
METRICS = [rs.logit_diff(f" {right}", f" {wrong}") for _, right, wrong in _PAIRS]
METRIC = rs.logit_diff([f" {right}" for _, right, _ in _PAIRS], [f" {wrong}" for *_, wrong in _PAIRS])
