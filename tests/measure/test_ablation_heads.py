"""Ablation of single heads against plain hooks on what the output projection reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from measure.test_ablation import METRIC, PROMPTS, REFERENCE, difference
from models.test_inside import HEADS, by_hand, patched
from stream.test_read import CLOSE, says, unchecked
from tiny import LAYERS, SUPPORTED, tokenizer

import resstream as rs
from resstream.errors import SiteError
from resstream.measure import ablation
from resstream.sites import Site


@pytest.fixture(scope="module", params=["gpt2", "llama", "neox_parallel", "gemma2", "bloom"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def hf_model(name):
    return SUPPORTED[name]()


@pytest.fixture(scope="module")
def model(name, hf_model):
    return rs.load(hf_model, name=name, tokenizer=tokenizer())


def by_plain_hooks(name, hf_model, model, stand_in):
    """Each prompt's metric without each head; what stands in for it comes from (layer, head, its own z)."""
    grid = np.zeros((len(PROMPTS), LAYERS * HEADS))
    for row, prompt in enumerate(PROMPTS):
        ids = model.tokenize(prompt).ids
        for layer in range(LAYERS):
            for head in range(HEADS):

                def change(own, layer=layer, head=head):
                    new = own.clone()
                    new[:, :, head] = stand_in(layer, head, own[:, :, head])
                    return new

                with torch.no_grad():
                    logits = patched(name, hf_model, ids, "z", layer, change)[0]
                grid[row, layer * HEADS + head] = difference(logits, row)
    return grid


def the_heads_are_plain_hooks(name, hf_model, model, how, stand_in):
    data = rs.ablate_layers(model, PROMPTS, unit="head", how=how, metric=METRIC, reference=REFERENCE).data
    assert data.unit.values.tolist() == [f"{layer}.head.{head}" for layer in range(LAYERS) for head in range(HEADS)]
    expected = by_plain_hooks(name, hf_model, model, stand_in)
    assert np.abs(data.metric.values - expected).max() < 4 * CLOSE
    assert np.abs(data.effect.values).max() > 1e-3, "and a head does something"


def means_by_hand(name, hf_model, model):
    """The mean z of each layer over all tokens of the references, each run alone."""
    seen = [by_hand(name, hf_model, model.tokenize(prompt).ids, "z") for prompt in REFERENCE]
    return [torch.cat([each[layer][0] for each in seen]).mean(dim=0) for layer in range(LAYERS)]


@pytest.mark.parametrize("how", ["skip", "zero"])
def test_a_head_that_is_skipped_reads_nothing(how, name, hf_model, model):
    the_heads_are_plain_hooks(name, hf_model, model, how, lambda layer, head, own: torch.zeros_like(own))


def test_a_head_at_its_mean(name, hf_model, model):
    means = means_by_hand(name, hf_model, model)
    the_heads_are_plain_hooks(name, hf_model, model, "mean", lambda layer, head, own: means[layer][head].expand_as(own))


@pytest.mark.parametrize("name", ["llama"], indirect=True)
def test_another_head_is_noticed(name, hf_model, model, monkeypatch):
    """The twin of the tests above."""
    monkeypatch.setattr(ablation, "_moved", lambda unit: Site(unit.layer, "z", (unit.part + 1) % HEADS))
    with pytest.raises(AssertionError):
        test_a_head_that_is_skipped_reads_nothing("skip", name, hf_model, model)


@pytest.fixture(scope="module")
def toy():
    return rs.load(SUPPORTED["llama"](), name="toy", tokenizer=tokenizer())


def test_resampled_heads_are_another_prompts(toy):
    """Of two prompts each gets the other's."""
    pair = ["w1 w2 w3", "w4 w5 w6"]
    data = rs.ablate_layers(
        toy, pair, unit="head", how="resample", layers=["1.head.2"], metric=rs.logit_diff(4, 7)
    ).data
    for row, other in enumerate(reversed(pair)):
        donor = by_hand("llama", toy.hf_model, toy.tokenize(other).ids, "z")[1]

        def change(own, donor=donor):
            new = own.clone()
            new[:, :, 2] = donor[:, :, 2]
            return new

        with torch.no_grad():
            logits = patched("llama", toy.hf_model, toy.tokenize(pair[row]).ids, "z", 1, change)[0, -1]
        assert abs(float(data.metric[row, 0]) - float(logits[4] - logits[7])) < 4 * CLOSE


def test_choices_of_heads(toy):
    def units(layers):
        return rs.ablate_layers(toy, PROMPTS, unit="head", layers=layers, metric=METRIC).data.unit.values.tolist()

    assert units("1.head.3") == ["1.head.3"]
    assert units([1]) == [f"1.head.{head}" for head in range(HEADS)]
    assert units(["2.head.0", "0.head.1"]) == ["2.head.0", "0.head.1"]
    assert units([["2.head.0", "0.head.1"], [1]]) == ["0.head.1+2.head.0", "+".join(units([1]))]


def test_all_heads_of_a_layer_are_its_attention_but_for_the_bias(toy):
    """Llama's output projection has none."""
    heads = rs.ablate_layers(toy, PROMPTS, unit="head", layers=[[0], [2]], metric=METRIC).data.metric
    attn = rs.ablate_layers(toy, PROMPTS, unit="attn", layers=[0, 2], metric=METRIC).data.metric
    assert np.abs(heads.values - attn.values).max() < CLOSE


@pytest.mark.parametrize(
    ("layers", "parts"),
    [
        (["1.head.4"], ('no site "1.head.4"', "query heads 0-3")),
        (["1.attn"], ('"1.attn" is not a head', '"1.head.0"')),
        ([3], ("no layer 3",)),
    ],
)
def test_a_head_that_is_not_there(layers, parts, toy):
    with unchecked(), pytest.raises(SiteError) as error:
        rs.ablate_layers(toy, PROMPTS, unit="head", layers=layers, metric=METRIC)
    assert says(error, *parts)
