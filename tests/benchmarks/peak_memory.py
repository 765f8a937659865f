"""The most memory that a sweep takes above a loaded model: python -m tests.benchmarks.peak_memory SWEEP BUDGET"""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch

import resstream as rs
from tests.benchmarks import many_pairs


def pairs(model: rs.ResidualModel, memory: int) -> rs.Result:
    """32 pairs of four lengths."""
    return rs.patch_activations(
        model, many_pairs.CLEAN, many_pairs.CORRUPTED, many_pairs.METRIC, layers=[0, 10, 20], memory=memory
    )


def long_pair(model: rs.ResidualModel, memory: int, *, position: int, layers: str | list[int]) -> rs.Result:
    """2048 tokens of prose against as many others."""
    ids = torch.tensor(model.tokenizer(" ".join(topics.values())[:40000])["input_ids"])
    clean, corrupted = ids[None, :2048], ids[None, 2048:4096]
    return rs.patch_activations(
        model, clean, corrupted, rs.logit_diff(" the", " a"), positions=[position], layers=layers, memory=memory
    )


SWEEPS = {
    "pairs": pairs,
    "long-last": partial(long_pair, position=-1, layers="each"),
    "long-middle": partial(long_pair, position=1024, layers=[0, 10, 20, 29]),
}


def resident(field: str) -> int:
    """Bytes of this process in memory: now (VmRSS), or at most since the mark was last set back (VmHWM)."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main(sweep: str, memory: int) -> None:
    """Run one sweep, and print what it took, its check, and how many cells it found."""
    torch.set_num_threads(2)
    model = rs.load("smollm2")
    # What is loaded or compiled once, weights among it, is not the sweep's.
    rs.patch_activations(model, many_pairs.CLEAN[0], many_pairs.CORRUPTED[0], many_pairs.METRICS[0], positions=[-1])
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # sets the mark back
    found = SWEEPS[sweep](model, memory)
    print(json.dumps([resident("VmHWM") - before, found.check.error, int(found.data.metric.notnull().sum())]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
