"""How the time and memory of patching sweeps grow: with pairs, layers and positions, up to prompts of 2048 tokens."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import resstream as rs
from tests.benchmarks.many_pairs import CLEAN, CORRUPTED, METRIC, METRICS
from tests.benchmarks.side_by_side import medians

UNRELATED = (
    "When Mary and John went to the store, John gave a drink to",
    "While Kate or Paul sat in a park; Paul sold his book for",
)
SLACK = 1.25  # what medians of five still vary by


@pytest.fixture
def two_threads():
    """Two threads, as many as the smallest machine that this is run on has cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_pairs_in_one_call_against_a_loop_over_them(smollm2, two_threads):
    """32 pairs of four lengths; the naive loop, a forward pass a cell, is timed on a sample."""
    layers, found = list(range(0, 30, 6)), {}

    def together():
        found["together"] = rs.patch_activations(smollm2, CLEAN, CORRUPTED, METRIC, layers=layers)

    def one_by_one():
        found["alone"] = [
            rs.patch_activations(smollm2, clean, corrupted, metric, layers=layers)
            for clean, corrupted, metric in zip(CLEAN, CORRUPTED, METRICS, strict=True)
        ]

    def four_passes():
        with torch.no_grad():
            for prompt in CORRUPTED[:4]:
                smollm2.hf_model(input_ids=smollm2.tokenize(prompt).ids, use_cache=False, logits_to_keep=1)

    times = medians({"together": together, "alone": one_by_one, "passes": four_passes}, rounds=3)
    grid = found["together"].data.metric
    apart = max(
        float(np.abs(grid[row, ..., : each.data.sizes["position"]].values - each.data.metric[0].values).max())
        for row, each in enumerate(found["alone"])
    )
    cells = int(grid.notnull().sum())
    naive = times["passes"] / 4 * cells
    print(f"\n{len(CLEAN)} pairs of {sorted(set(grid.length.values.tolist()))} tokens, {cells} cells", end=": ")
    print(
        f"one call {times['together']:.2f} s, a call each {times['alone']:.2f} s, a pass a cell {naive:.0f} s", end="; "
    )
    print(f"largest difference {apart:.1e}")
    assert apart < 1e-4
    assert times["together"] <= 1.2 * min(times["alone"], naive)


GROWTH = {
    "layers": [{"layers": range(0, 30, step)} for step in (8, 4, 2, 1)],
    "positions": [{"positions": range(0, 14, step)} for step in (4, 2, 1)],
    "pairs": [{"pairs": pairs} for pairs in (1, 2, 4, 8)],
}


@pytest.mark.parametrize("axis", GROWTH)
def test_a_larger_grid_costs_no_more_than_its_rows(axis, smollm2, two_threads):
    """Rows count by the layers that they run; the prompts differ everywhere, so that no row comes free."""

    def sweep(pairs=1, layers=(0, 10, 20), positions=range(14)):
        clean, corrupted = ([prompt] * pairs for prompt in UNRELATED)
        metric = rs.logit_diff(" Mary", " John")
        return rs.patch_activations(smollm2, clean, corrupted, metric, layers=list(layers), positions=list(positions))

    def work(pairs=1, layers=(0, 10, 20), positions=range(14)):
        return pairs * len(positions) * sum(30 - layer for layer in layers)

    grids = {str(number): options for number, options in enumerate(GROWTH[axis])}
    found = medians({name: lambda options=options: sweep(**options) for name, options in grids.items()}, rounds=5)
    costs = [found[name] / work(**options) for name, options in grids.items()]
    print(f"\nmore {axis}, each row and layer: " + ", ".join(f"{1e3 * cost:.3f}" for cost in costs) + " ms")
    assert max(costs) <= SLACK * costs[0]


BUDGETS = [("pairs", 256), ("pairs", 1024), ("long-last", 1024), ("long-middle", 1024)]


@pytest.mark.parametrize(("sweep", "mebibytes"), BUDGETS)
def test_memory_stays_below_the_budget(sweep, mebibytes):
    """Above a loaded model, in a process of its own: 32 pairs, and prompts of 2048 tokens."""
    command = [sys.executable, "-m", "tests.benchmarks.peak_memory", sweep, str(mebibytes * 2**20)]
    begin = time.perf_counter()
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    above, error, cells = json.loads(run.stdout)
    print(f"\n{sweep}: {cells} cells took {above / 2**20:.0f} MiB of {mebibytes}", end=", ")
    print(f"and the whole process {time.perf_counter() - begin:.0f} s; check {error:.1e}")
    assert error < 1e-5
    assert above < mebibytes * 2**20
