"""Measure rivals in turn, so that a busy moment of the machine falls on all of them alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable


def medians(rivals: dict[str, Callable[[], object]], *, rounds: int = 5, warm_up: int = 1) -> dict[str, float]:
    """The median time of each rival in seconds, over rounds in which each runs once."""
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for number in range(warm_up + rounds):
        for name, run in rivals.items():
            begin = time.perf_counter()
            kept = run()
            taken = time.perf_counter() - begin
            # What a run leaves behind is cleared away between the runs, at nobody's cost.
            del kept
            gc.collect()
            if number >= warm_up:
                times[name].append(taken)
    return {name: statistics.median(found) for name, found in times.items()}
