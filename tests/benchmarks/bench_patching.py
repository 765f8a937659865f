"""The 30 x 14 patching grid on SmolLM2, against TransformerLens's own function on the same weights."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import resstream as rs
from tests.benchmarks.side_by_side import medians

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"
UNRELATED = "While Kate or Paul sat in a park; Paul sold his book for"


@pytest.fixture
def two_threads():
    """Two threads for both sides, as many as the smallest machine that this is run on has cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("corrupted", "floor"), [(CORRUPTED, 8.0), (UNRELATED, 2.0)], ids=["one token", "every token"])
def test_patching_grid_against_transformer_lens(smollm2, two_threads, corrupted, floor):
    from transformer_lens import patching
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    hf_model = copy.deepcopy(smollm2.hf_model)
    bridge = build_bridge_from_module(hf_model, type(hf_model).__name__, hf_config=hf_model.config)
    clean_ids, corrupted_ids = smollm2.tokenize(CLEAN).ids, smollm2.tokenize(corrupted).ids
    mary, john = (smollm2.tokenizer(name)["input_ids"][0] for name in (" Mary", " John"))

    def difference(logits):
        return logits[0, -1, mary] - logits[0, -1, john]

    with torch.no_grad():
        _, clean_cache = bridge.run_with_cache(clean_ids)
    found = {}

    def theirs():
        with torch.no_grad():
            found["theirs"] = patching.get_act_patch_resid_pre(bridge, corrupted_ids, clean_cache, difference)

    def ours():
        found["ours"] = rs.patch_activations(smollm2, CLEAN, corrupted, rs.logit_diff(" Mary", " John"))

    # TransformerLens takes half a minute a round, so it gets one; ours is the median of several.
    slow = medians({"theirs": theirs}, rounds=1, warm_up=0)["theirs"]
    fast = medians({"ours": ours}, rounds=3)["ours"]
    grid = found["ours"].data.metric[0, 0].values
    apart = float(np.abs(grid - found["theirs"].numpy()).max())
    print(f"\n420 cells: TransformerLens {slow:.2f} s, resstream {fast:.2f} s")
    print(f"{slow / fast:.1f} times as fast; largest difference {apart:.1e}")
    assert apart < 1e-4
    assert slow / fast >= floor
