"""The layer ensemble: every subset of twelve layers against as many forward passes, and Shapley values of thirty."""

from __future__ import annotations

import copy
import time

import pytest
import torch

import resstream as rs
from tests.benchmarks.side_by_side import medians

PROMPT = "When Mary and John went to the store, John gave a drink to"
NAMES = [("Mary", "John"), ("Tom", "Anna"), ("James", "Lisa"), ("Paul", "Kate")]
PLACES = ["went to the store, {} gave a drink to", "walked into the park, {} handed a ball to"]
PASSES = 64


@pytest.fixture(scope="module")
def twelve_layers(smollm2):
    """The first twelve layers of SmolLM2 as a model of their own."""
    hf_model = copy.deepcopy(smollm2.hf_model)
    hf_model.model.layers = hf_model.model.layers[:12]
    hf_model.config.num_hidden_layers = 12
    return rs.load(hf_model, name="twelve layers", tokenizer=smollm2.tokenizer)


def test_every_subset_of_twelve_layers_against_separate_passes(twelve_layers):
    ids = twelve_layers.tokenize(PROMPT).ids

    def passes():
        with torch.no_grad():
            for _ in range(PASSES):
                twelve_layers.hf_model(input_ids=ids, use_cache=False, logits_to_keep=1)

    def ensemble():
        return rs.layer_ensemble(twelve_layers, PROMPT, rs.logit_diff(" Mary", " John"))

    times = medians({"passes": passes, "ensemble": ensemble}, rounds=3)
    # A pass is a pass: 64 of them say how long 4096 take.
    separate = times["passes"] * 2**12 / PASSES
    print(f"\n2^12 subsets: {times['ensemble']:.1f} s, as many forward passes {separate:.0f} s", end=", ")
    print(f"{separate / times['ensemble']:.1f} times as fast")
    assert separate / times["ensemble"] >= 8


def test_shapley_values_of_thirty_layers_on_eight_prompts(smollm2):
    pairs = [(names, place) for place in PLACES for names in NAMES]
    prompts = [f"When {a} and {b} {place.format(b)}" for (a, b), place in pairs]
    metric = rs.logit_diff([f" {a}" for (a, _), _ in pairs], [f" {b}" for (_, b), _ in pairs])
    tokens = smollm2.tokenize(prompts)

    def seconds(samples):
        # Processor time, since what is compared with ten minutes should not depend on who else is at work.
        begin = time.process_time()
        rs.layer_ensemble(smollm2, tokens, metric, samples=samples)
        return time.process_time() - begin

    def one_pass():
        with torch.no_grad():
            smollm2.hf_model(input_ids=tokens.ids, use_cache=False, logits_to_keep=1)

    seconds(2)
    few, more = seconds(4), seconds(14)
    whole = few + (more - few) / 10 * 196
    one = medians({"pass": one_pass}, rounds=5)["pass"]
    print(f"\nShapley values of 30 layers, {len(tokens)} prompts of {tokens.width} tokens, on one core", end=": ")
    print(f"200 orders in {whole:.0f} s; with a forward pass for each subset {200 * 29 * one:.0f} s")
    assert whole < 600
