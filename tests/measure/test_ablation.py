"""Layer ablation against plain forward hooks that take the same writes out of the untouched model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from models.test_trunk import plant
from stream.test_read import ARCHITECTURES, Planted, by_hooks, says, unchecked
from tiny import LAYERS, blocks_of, state_of, tokenizer

import resstream as rs
from resstream.errors import MetricError, PromptError, SiteError
from resstream.models.causal_lm import CausalLM, CausalTrunk

NAMES = ("gpt2", "llama", "neox_parallel", "gemma2", "granite")
PROMPTS = ["w1 w2 w3 w4 w5", "w9 w8 w7", "w3 w1 w4 w1"]
REFERENCE = ["w5 w6 w7 w8 w9 w1", "w2 w4", "w7 w7 w1 w2 w3 w9 w8"]
METRIC = rs.logit_diff([4, 5, 6], 7)
CLOSE = 3e-6  # logits, which are some 0.5 here
SETS = [[0], [1], [2], [0, 2], [0, 1, 2], []]


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def hf_model(name):
    return ARCHITECTURES[name]()


@pytest.fixture(scope="module")
def model(name, hf_model):
    return rs.load(hf_model, name=name, tokenizer=tokenizer())


@pytest.fixture(scope="module")
def toy():
    return rs.load(ARCHITECTURES["llama"](), name="toy", tokenizer=tokenizer())


def difference(logits, row):
    """The metric by hand, from the logits of one prompt."""
    return float(logits[-1, (4, 5, 6)[row]] - logits[-1, 7])


def writes_by_hand(name, hf_model, model, prompts, unit):
    """What a unit writes in each layer, for each prompt run alone."""
    found = []
    for prompt in prompts:
        with torch.no_grad():
            seen = by_hooks(name, hf_model, model.tokenize(prompt).ids).values
        whole = [seen[f"{layer}.resid_post"] - seen[f"{layer}.resid_pre"] for layer in range(LAYERS)]
        found.append(whole if unit == "layer" else [seen[f"{layer}.{unit}"] for layer in range(LAYERS)])
    return found


def removal(layers, unit, stand_ins):
    """The changes that put something in place of a unit's write; a layer's is written by its attention alone."""
    changes = {}
    for layer in layers:
        put = stand_ins[layer]
        changes[f"{layer}.{'attn' if unit == 'layer' else unit}"] = lambda value, put=put: put.expand_as(value)
        if unit == "layer":
            changes[f"{layer}.mlp"] = torch.zeros_like
    return changes


def by_hand(name, hf_model, model, unit, stand_ins):
    """The metric of each prompt without each set of layers, with a prompt's stand-ins in their place."""
    grid = np.zeros((len(PROMPTS), len(SETS)))
    for row, prompt in enumerate(PROMPTS):
        ids = model.tokenize(prompt).ids
        with torch.no_grad():
            for column, layers in enumerate(SETS):
                grid[row, column] = difference(
                    by_hooks(name, hf_model, ids, removal(layers, unit, stand_ins[row])).logits, row
                )
    return grid


def the_ablation_is_by_hand(name, hf_model, model, unit, how, grid):
    result = rs.ablate_layers(model, PROMPTS, unit=unit, how=how, layers=SETS, metric=METRIC, reference=REFERENCE)
    assert np.abs(result.data.metric.values - grid).max() < CLOSE
    assert np.abs(result.data.base.values - grid[:, -1]).max() < CLOSE
    assert np.abs(result.data.effect.values - (grid - grid[:, -1:])).max() < 2 * CLOSE
    assert np.abs(result.data.effect.values[:, :-1]).min(axis=1).max() > 100 * CLOSE, "and ablations do something"
    assert (result.data.metric.values[:, -1] == result.data.base.values).all(), "the empty set is the base, bit for bit"
    assert result.check.passed


def zeros(_):
    return [torch.zeros(32)] * LAYERS


@pytest.mark.parametrize("unit", ["layer", "attn", "mlp"])
def test_skip_zero_and_mean_equal_hooks(unit, name, hf_model, model):
    nothing = by_hand(name, hf_model, model, unit, [zeros(prompt) for prompt in PROMPTS])
    the_ablation_is_by_hand(name, hf_model, model, unit, "skip", nothing)
    the_ablation_is_by_hand(name, hf_model, model, unit, "zero", nothing)
    writes = writes_by_hand(name, hf_model, model, REFERENCE, unit)
    means = [torch.cat([prompt[layer] for prompt in writes]).mean(dim=0) for layer in range(LAYERS)]
    mean = by_hand(name, hf_model, model, unit, [means] * len(PROMPTS))
    the_ablation_is_by_hand(name, hf_model, model, unit, "mean", mean)


@pytest.mark.parametrize("unit", ["layer", "attn", "mlp"])
def test_resample_equals_hooks(unit, name, hf_model, model):
    """Each prompt gets the writes of one reference prompt that is long enough, the same one in every layer."""
    able = [writes for writes in writes_by_hand(name, hf_model, model, REFERENCE, unit) if len(writes[0]) >= 5]
    assert len(able) == 2
    lengths = [len(prompt.split()) for prompt in PROMPTS]
    cut = [[[write[:length] for write in donor] for length in lengths] for donor in able]
    grids = np.stack([by_hand(name, hf_model, model, unit, each) for each in cut])
    drawn = []
    for seed in range(5):
        data = rs.ablate_layers(
            model, PROMPTS, unit=unit, how="resample", layers=SETS, metric=METRIC, reference=REFERENCE, seed=seed
        ).data
        errors = np.abs(data.metric.values - grids).max(axis=2)
        assert (errors.min(axis=0) < CLOSE).all()
        assert (errors.max(axis=0) > 100 * CLOSE).all()
        drawn += errors.argmin(axis=0).tolist()
    assert set(drawn) == {0, 1}, "and each is drawn some time"


PLANTS = [
    (CausalTrunk, "layer", None, "attn"),
    (CausalTrunk, "write", "attn", "mlp"),
    (CausalTrunk, "write", "mlp", "attn"),
]


@pytest.mark.parametrize("name", ["gpt2", "neox_parallel"], indirect=True)
@pytest.mark.parametrize(("owner", "method", "kind", "unit"), PLANTS)
@pytest.mark.parametrize("how", ["skip", "mean"])
def test_an_ablation_that_is_off_is_noticed(how, owner, method, kind, unit, name, hf_model, model, monkeypatch):
    """The twin of the tests above: what is left runs with an error of 0.1 %."""
    writes = writes_by_hand(name, hf_model, model, REFERENCE, unit)
    means = [torch.cat([prompt[layer] for prompt in writes]).mean(dim=0) for layer in range(LAYERS)]
    stand_ins = zeros(None) if how == "skip" else means
    grid = by_hand(name, hf_model, model, unit, [stand_ins] * len(PROMPTS))
    plant(monkeypatch, owner, method, kind)
    with pytest.raises(AssertionError):
        the_ablation_is_by_hand(name, hf_model, model, unit, how, grid)


@pytest.mark.parametrize("how", ["skip", "zero", "mean", "resample"])
@pytest.mark.parametrize("unit", ["layer", "attn", "mlp"])
def test_an_empty_set_changes_nothing(unit, how, toy):
    """Case 9: KL 0, and the base score bit for bit."""
    options = {"unit": unit, "how": how, "layers": [[]], "reference": REFERENCE}
    kl = rs.ablate_layers(toy, PROMPTS, metric=rs.kl_from_base(), **options)
    assert (kl.data.metric == 0).all()
    assert (kl.data.effect == 0).all()
    loss = rs.ablate_layers(toy, PROMPTS, **options)
    assert (loss.data.metric.squeeze() == loss.data.base).all()
    assert kl.data.unit.values.tolist() == ["none"]
    json.dumps(kl.settings, allow_nan=False)


def test_the_references_are_the_prompts_unless_others_are_given(name, hf_model, model):
    own = rs.ablate_layers(model, PROMPTS, how="mean", metric=METRIC).data
    given = rs.ablate_layers(model, PROMPTS, how="mean", metric=METRIC, reference=PROMPTS).data
    assert own.identical(given)
    # A prompt is never resampled from itself, so of two prompts each gets the other's.
    pair = ["w1 w2 w3", "w4 w5 w6"]
    found = rs.ablate_layers(model, pair, how="resample", unit="mlp", layers=[1], metric=rs.log_prob(4)).data.metric
    for row, other in enumerate(reversed(pair)):
        (writes,) = writes_by_hand(name, hf_model, model, [other], "mlp")
        with torch.no_grad():
            logits = by_hooks(
                name, hf_model, model.tokenize(pair[row]).ids, {"1.mlp": lambda v, w=writes[1]: w[None]}
            ).logits
        assert abs(float(found[row, 0]) - float(logits[-1].log_softmax(-1)[4])) < CLOSE


@pytest.mark.parametrize("how", ["skip", "mean", "resample"])
def test_a_row_of_a_batch_equals_the_row_alone(how, model):
    """Case 10, too: references of unequal length, whatever the batch."""
    metric = rs.logit_diff(4, 7)
    options = {"how": how, "unit": "mlp", "metric": metric, "reference": REFERENCE}
    batch = rs.ablate_layers(model, PROMPTS, **options).data.metric.values
    alone = [rs.ablate_layers(model, prompt, **options).data.metric.values[0] for prompt in PROMPTS]
    assert np.abs(batch - np.stack(alone)).max() < CLOSE
    backwards = rs.ablate_layers(model, PROMPTS[::-1], **options).data.metric.values
    assert np.abs(batch - backwards[::-1]).max() < CLOSE
    if how == "mean":
        reordered = rs.ablate_layers(model, PROMPTS, **{**options, "reference": REFERENCE[::-1]}).data.metric.values
        assert np.abs(batch - reordered).max() < CLOSE


@pytest.mark.parametrize("tokens", [1, 17])
def test_chunks_change_nothing(tokens, toy, monkeypatch):
    whole = rs.ablate_layers(toy, PROMPTS, layers=SETS, metric=METRIC).data
    monkeypatch.setattr("resstream.stream.run.TOKENS_PER_CHUNK", tokens)
    some = rs.ablate_layers(toy, PROMPTS, layers=SETS, metric=METRIC).data
    assert np.abs(whole.metric.values - some.metric.values).max() < CLOSE


def test_skipping_is_what_the_edit_does(toy):
    found = rs.ablate_layers(toy, PROMPTS, metric=METRIC, layers=[[1], [0, 2]]).data
    for column, edits in enumerate(([rs.Skip(1)], [rs.Skip(0), rs.Skip(2)])):
        with torch.no_grad(), rs.edited(toy, *edits) as m:
            for row, prompt in enumerate(PROMPTS):
                assert abs(float(found.metric[row, column]) - difference(m.logits(prompt)[0], row)) < CLOSE


def test_smollm2_layers(smollm2):
    """Three layers and one branch of each kind against hooks."""
    prompt = "The Eiffel Tower is in the city of"
    ids = smollm2.tokenizer(prompt, return_tensors="pt")["input_ids"]
    paris = smollm2.tokenizer(" Paris")["input_ids"][0]
    for unit, layers in (("layer", [0, 14, 29]), ("attn", [17]), ("mlp", [1])):
        data = rs.ablate_layers(smollm2, prompt, unit=unit, layers=layers, metric=rs.log_prob(" Paris")).data
        for column, layer in enumerate(layers):
            with torch.no_grad():
                changes = removal([layer], unit, {layer: torch.zeros(576)})
                logits = by_hooks("llama", smollm2.hf_model, ids, changes).logits
            assert abs(float(data.metric[0, column]) - float(logits[-1].log_softmax(-1)[paris])) < 1e-4
        assert float(data.base[0]) == pytest.approx(np.log(0.656), abs=1e-3)


LAYER_CHOICES = {
    "each": ("each", ["0.mlp", "1.mlp", "2.mlp"]),
    "number": (1, ["1.mlp"]),
    "from the end": (-1, ["2.mlp"]),
    "each of several": ([2, 0], ["2.mlp", "0.mlp"]),
    "together": ([[0, 2], [1]], ["0.mlp+2.mlp", "1.mlp"]),
    "twice is once": ([[2, 2, -1]], ["2.mlp"]),
}


@pytest.mark.parametrize("case", LAYER_CHOICES)
def test_choices_of_layers(case, toy):
    layers, names = LAYER_CHOICES[case]
    result = rs.ablate_layers(toy, PROMPTS, unit="mlp", layers=layers, metric=METRIC)
    assert result.data.unit.values.tolist() == names
    each = rs.ablate_layers(toy, PROMPTS, unit="mlp", metric=METRIC).data.metric
    for name in names:
        if "+" not in name:
            assert np.abs(result.data.metric.sel(unit=name) - each.sel(unit=name)).max() < CLOSE
    assert result.settings["layers"] == (layers if isinstance(layers, str | int) else list(layers))


def test_labels(toy):
    result = rs.ablate_layers(toy, PROMPTS, metric=METRIC)
    assert result.data.metric.dims == ("prompt", "unit")
    assert result.data.text.values.tolist() == ["".join(prompt.split()) for prompt in PROMPTS]
    assert result.settings == {
        "unit": "layer",
        "how": "skip",
        "metric": "logit difference of 3 answers - 7",
        "units": "logits",
        "layers": "each",
    }
    mean = result.data.effect.mean("prompt")
    worst = int(np.abs(mean.values).argmax())
    assert f"largest effect {worst} ({float(mean[worst]):+.2f} logits)" in result.headline
    default = rs.ablate_layers(toy, PROMPTS)
    assert (default.settings["metric"], default.settings["units"]) == ("loss", "nats")


@pytest.mark.parametrize("method", ["layer", "readout"])
def test_the_check_notices_a_planted_error(method, toy, monkeypatch):
    plant(monkeypatch, CausalTrunk if method == "layer" else CausalLM, method)
    check = rs.ablate_layers(toy, PROMPTS, metric=METRIC).check
    assert not check.passed
    assert check.name == "base run = the model's own logits"


# Errors

WRONG = {
    "unit": ({"unit": "neuron"}, SiteError, 'unit="neuron"', "is not known", "choose from 'layer', 'attn', 'mlp'"),
    "how": (
        {"how": "remove"},
        SiteError,
        'how="remove"',
        "is not known",
        "choose from 'skip', 'zero', 'mean', 'resample'",
    ),
    "layer": ({"layers": [[0, 3]]}, SiteError, "no layer 3", "toy has layers 0-2", "did you mean 2?"),
    "layers": ({"layers": "all"}, SiteError, 'layers="all"', "is not a choice of layers", 'write layers="each"'),
    "no layers": ({"layers": []}, SiteError, "no layers to remove", "write layers='each', or a list such as [0, 5]"),
    "no partner": (
        {"how": "resample"},
        PromptError,
        "prompt 0 has 5 tokens",
        "no other prompt to resample from is as long (lengths [5, 3, 4])",
        "give some with reference=[...]",
    ),
    "short reference": (
        {"how": "resample", "reference": ["w1 w2"]},
        PromptError,
        "prompt 0 has 5 tokens",
        "is as long (lengths [2])",
        "give some with reference=[...]",
    ),
    "answers": ({"metric": rs.log_prob([1, 2])}, MetricError, "2 answers", "for 3 prompts", "one for each prompt"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_choice(case, toy):
    options, kind, *parts = WRONG[case]
    with unchecked(), pytest.raises(kind) as error:
        rs.ablate_layers(toy, PROMPTS, **options)
    assert says(error, *parts)


def test_the_model_is_as_it_was(name):
    hf_model = ARCHITECTURES[name]().train()
    model = rs.load(hf_model, tokenizer=tokenizer())
    before = state_of(hf_model)
    for how in ("skip", "mean", "resample"):
        rs.ablate_layers(model, PROMPTS, how=how, unit="attn", reference=REFERENCE)
    assert state_of(hf_model) == before

    def fail(*_):
        raise Planted

    blocks_of(hf_model)[1].register_forward_pre_hook(fail)
    before = state_of(hf_model)
    with pytest.raises(Planted):
        rs.ablate_layers(model, PROMPTS)
    assert state_of(hf_model) == before
