"""Patching sweeps on SmolLM2 against TransformerLens's own functions on the same weights, and against plain hooks."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

import resstream as rs
from tests.benchmarks.side_by_side import medians

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"
UNRELATED = "While Kate or Paul sat in a park; Paul sold his book for"
METRIC = rs.logit_diff(" Mary", " John")
LAYERS, HEADS, D_HEAD, WIDTH = 30, 9, 64, 14
SAMPLE = 40


@pytest.fixture
def two_threads():
    """Two threads for both sides, as many as the smallest machine that this is run on has cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def bridge(smollm2):
    """A copy of the weights as TransformerLens runs them."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    hf_model = copy.deepcopy(smollm2.hf_model)
    return build_bridge_from_module(hf_model, type(hf_model).__name__, hf_config=hf_model.config)


@pytest.fixture(scope="module")
def difference(smollm2):
    """The metric by hand, as a function of one prompt's logits."""
    mary, john = (smollm2.tokenizer(name)["input_ids"][0] for name in (" Mary", " John"))
    return lambda logits: logits[0, -1, mary] - logits[0, -1, john]


@contextmanager
def reading(module, function):
    """Pass what a module reads through a function, or only look at it where that returns None."""

    def hook(_, args, kwargs):
        x = args[0] if args else kwargs["hidden_states"]
        new = function(x)
        if new is None:
            return None
        return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": new})

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def by_hooks(model, difference, corrupted, layer, head=None, position=None):
    """One cell by two plain forward passes: a layer's input or a head's output, at one position or at all."""
    block = model.hf_model.model.layers[layer]
    module = block if head is None else block.self_attn.o_proj
    columns = slice(None) if head is None else slice(head * D_HEAD, (head + 1) * D_HEAD)
    where = slice(None) if position is None else position
    seen = []

    def splice(x):
        x = x.clone()
        x[:, where, columns] = seen[0][:, where, columns]
        return x

    with torch.no_grad():
        with reading(module, seen.append):
            model.hf_model(input_ids=model.tokenize(CLEAN).ids)
        with reading(module, splice):
            return float(difference(model.hf_model(input_ids=model.tokenize(corrupted).ids).logits))


def theirs_of(bridge, model, difference, corrupted, sweep, **options):
    """A sweep by TransformerLens, as a function to be timed."""
    ids = model.tokenize(corrupted).ids
    with torch.no_grad():
        _, cache = bridge.run_with_cache(model.tokenize(CLEAN).ids)

    def run():
        with torch.no_grad():
            return sweep(bridge, ids, cache, difference, **options)

    return run


def timed(run, rounds, warm_up=1):
    """How long a sweep takes, in seconds, and what it found."""
    kept = {}
    seconds = medians({"it": lambda: kept.update(found=run())}, rounds=rounds, warm_up=warm_up)["it"]
    return seconds, kept["found"]


def compare(cells, slow, fast, floor, apart, naive):
    print(f"\n{cells} cells: TransformerLens {slow:.2f} s, resstream {fast:.3f} s, {slow / fast:.1f} times as fast")
    print(f"largest difference {apart:.1e}, from plain hooks on {SAMPLE} of the cells {naive:.1e}")
    assert max(apart, naive) < 1e-4
    assert slow / fast >= floor


def some_of(*shape):
    """Cells of a grid, the same in every run."""
    numbers = np.random.default_rng(0).choice(int(np.prod(shape)), SAMPLE, replace=False)
    return [tuple(map(int, place)) for place in np.transpose(np.unravel_index(numbers, shape))]


@pytest.mark.parametrize(("corrupted", "floor"), [(CORRUPTED, 50), (UNRELATED, 10)], ids=["one token", "every token"])
def test_residuals(smollm2, bridge, difference, two_threads, corrupted, floor):
    from transformer_lens import patching

    theirs = theirs_of(bridge, smollm2, difference, corrupted, patching.get_act_patch_resid_pre)
    # TransformerLens takes half a minute a round, so it gets one; ours is the median of several.
    slow, expected = timed(theirs, rounds=1, warm_up=0)
    fast, result = timed(partial(rs.patch_activations, smollm2, CLEAN, corrupted, METRIC), rounds=5)
    grid = result.data.metric[0, 0].values
    naive = max(
        abs(grid[layer, position] - by_hooks(smollm2, difference, corrupted, layer, position=position))
        for layer, position in some_of(LAYERS, WIDTH)
    )
    compare(grid.size, slow, fast, floor, float(np.abs(grid - expected.numpy()).max()), naive)


def test_heads_at_all_positions(smollm2, bridge, difference, two_threads):
    from transformer_lens import patching

    theirs = theirs_of(bridge, smollm2, difference, CORRUPTED, patching.get_act_patch_attn_head_out_all_pos)
    ours = partial(rs.patch_activations, smollm2, CLEAN, CORRUPTED, METRIC, sites="head", positions="all")
    slow, expected = timed(theirs, rounds=1, warm_up=0)
    fast, result = timed(ours, rounds=5)
    grid = result.data.metric[0, 0].values
    naive = max(
        abs(grid[layer, head] - by_hooks(smollm2, difference, CORRUPTED, layer, head))
        for layer, head in some_of(LAYERS, HEADS)
    )
    # 270 rows of five positions and 15.5 layers on average are 148 GFLOP: a second of matrix products on two cores.
    compare(grid.size, slow, fast, 15, float(np.abs(grid - expected.numpy()).max()), naive)


def test_heads_by_position(smollm2, bridge, difference, two_threads):
    """Of TransformerLens's sweep only a sample of cells is timed: a cell is a forward pass, whichever it is."""
    from transformer_lens import patching

    cells = some_of(LAYERS, HEADS, WIDTH)
    theirs = theirs_of(
        bridge,
        smollm2,
        difference,
        CORRUPTED,
        partial(
            patching.generic_activation_patch,
            patch_setter=patching.layer_pos_head_vector_patch_setter,
            activation_name="z",
        ),
        index_df=pd.DataFrame([(layer, at, head) for layer, head, at in cells], columns=["layer", "pos", "head_index"]),
    )
    sampled, expected = timed(theirs, rounds=1, warm_up=0)
    fast, result = timed(partial(rs.patch_activations, smollm2, CLEAN, CORRUPTED, METRIC, sites="head"), rounds=3)
    grid = result.data.metric[0, 0].values
    found = np.array([grid[place] for place in cells])
    naive = max(
        abs(grid[layer, head, at] - by_hooks(smollm2, difference, CORRUPTED, layer, head, at))
        for layer, head, at in cells
    )
    print(f"\nTransformerLens: {sampled:.1f} s for {SAMPLE} of {grid.size} cells, and as much for each other cell")
    slow = sampled * grid.size / SAMPLE
    compare(grid.size, slow, fast, 50, float(np.abs(found - expected.numpy()).max()), naive)
