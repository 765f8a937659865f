"""Activation patching against the naive loop: one plain run with forward hooks for every cell of the grid."""

from __future__ import annotations

import json
import warnings
from itertools import product

import numpy as np
import pytest
import torch
from models.test_trunk import plant
from stream.test_edits import at
from stream.test_read import ARCHITECTURES, CLOSE, Planted, by_hooks, kinds_of, says, unchecked
from tiny import LAYERS, apart, blocks_of, state_of, tokenizer

import resstream as rs
from resstream.errors import MetricError, PromptError, SiteError
from resstream.models.causal_lm import CausalLM, CausalTrunk

NAMES = ("gpt2", "llama", "neox_parallel", "gemma2", "granite")
CLEAN = ["w1 w2 w3 w4 w5", "w9 w8 w7", "w3 w1 w4 w1"]
CORRUPTED = ["w1 w6 w3 w4 w2", "w9 w4 w7", "w5 w1 w2 w1"]
METRIC = rs.logit_diff([4, 5, 6], 7)
IOI = (
    "When Mary and John went to the store, John gave a drink to",
    "When Mary and John went to the store, Mary gave a drink to",
)


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
    return logits[-1, (4, 5, 6)[row]] - logits[-1, 7]


def naive(name, hf_model, model, kinds, direction, score=None):
    """The grid cell by cell: each a plain run of one prompt whose hook puts in what the other prompt has there."""
    score = score or (lambda logits, row, ids, base: difference(logits, row))
    grid = np.full((len(CLEAN), len(kinds), LAYERS, 5), np.nan)
    ends = np.zeros((2, len(CLEAN)))
    for row, pair in enumerate(zip(CLEAN, CORRUPTED, strict=True)):
        ids = [model.tokenize(prompt).ids for prompt in pair]
        with torch.no_grad():
            runs = [by_hooks(name, hf_model, each) for each in ids]
            ends[:, row] = [score(run.logits, row, own[0], run.logits) for run, own in zip(runs, ids, strict=True)]
            target, donor = (1, 0) if direction == "denoise" else (0, 1)
            for (k, kind), layer, position in product(enumerate(kinds), range(LAYERS), range(ids[0].shape[1])):
                site = f"{layer}.{kind}"
                other = runs[donor].values[site][None]
                put = at(position, lambda value, other=other: other)
                logits = by_hooks(name, hf_model, ids[target], {site: put}).logits
                grid[row, k, layer, position] = score(logits, row, ids[target][0], runs[target].logits)
    return grid, ends


def the_grid_is_the_naive_loop(name, hf_model, model, direction, close=2 * CLOSE):
    kinds = kinds_of(name)
    grid, (clean, corrupted) = naive(name, hf_model, model, kinds, direction)
    result = rs.patch_activations(model, CLEAN, CORRUPTED, METRIC, sites=kinds, direction=direction)
    found = result.data.metric.transpose("prompt", "site", "layer", "position").values
    scale = np.nanmax(np.abs(grid))
    assert (np.isnan(found) == np.isnan(grid)).all()
    assert np.nanmax(np.abs(found - grid)) < close * scale
    assert np.abs(result.data.clean.values - clean).max() < close * scale
    assert np.abs(result.data.corrupted.values - corrupted).max() < close * scale
    start, end = (corrupted, clean) if direction == "denoise" else (clean, corrupted)
    effect = (grid - start[:, None, None, None]) / (end - start)[:, None, None, None]
    smallest = np.abs(end - start).min()
    assert np.nanmax(np.abs(result.data.effect.values - effect)) < 10 * close * scale / smallest
    assert np.nanmax(np.abs(found - start[:, None, None, None])) > 0.01, "and patches do something"
    assert result.check.passed


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_the_grid_is_the_naive_loop(direction, name, hf_model, model):
    """All kinds of site, several prompts of unequal length, each pair with an answer of its own."""
    the_grid_is_the_naive_loop(name, hf_model, model, direction)


PLANTS = [
    (CausalTrunk, "layer", None),
    (CausalTrunk, "write", "attn"),
    (CausalTrunk, "write", "mlp"),
    (CausalLM, "readout", None),
]


@pytest.mark.parametrize("name", ["gpt2", "neox_parallel"], indirect=True)
@pytest.mark.parametrize(("owner", "method", "kind"), PLANTS)
def test_a_grid_that_is_off_is_noticed(owner, method, kind, name, hf_model, model, monkeypatch):
    """The twin of the test above."""
    plant(monkeypatch, owner, method, kind)
    with pytest.raises(AssertionError):
        the_grid_is_the_naive_loop(name, hf_model, model, "denoise")


def test_smollm2_equals_the_naive_loop(smollm2, monkeypatch):
    """All 420 cells; the naive loop runs a position's thirty layers as thirty rows of one plain, hooked pass."""
    hf_model, metric = smollm2.hf_model, rs.logit_diff(" Mary", " John")
    clean, corrupted = (smollm2.tokenizer(prompt, return_tensors="pt")["input_ids"] for prompt in IOI)
    mary, john = (smollm2.tokenizer(name)["input_ids"][0] for name in (" Mary", " John"))
    expected = np.zeros((30, 14))
    with torch.no_grad():
        donor = by_hooks("llama", hf_model, clean).values
        ends = [hf_model(input_ids=ids).logits[0, -1] for ids in (clean, corrupted)]
        for position in range(14):

            def put(layer, position=position):
                def hook(_, args, kwargs):
                    x = args[0].clone()
                    x[layer, position] = donor[f"{layer}.resid_pre"][position]
                    return (x, *args[1:]), kwargs

                return hook

            blocks = enumerate(blocks_of(hf_model))
            handles = [block.register_forward_pre_hook(put(layer), with_kwargs=True) for layer, block in blocks]
            logits = hf_model(input_ids=corrupted.expand(30, -1), use_cache=False, logits_to_keep=1).logits[:, -1]
            for handle in handles:
                handle.remove()
            expected[:, position] = logits[:, mary] - logits[:, john]
    result = rs.patch_activations(smollm2, *IOI, metric)
    data = result.data.isel(prompt=0, site=0)
    assert float(data.clean) == pytest.approx(6.1196, abs=1e-3)
    assert float(data.corrupted) == pytest.approx(-5.4853, abs=1e-3)
    assert float(data.clean) == pytest.approx(float(ends[0][mary] - ends[0][john]), abs=1e-4)
    assert float(data.corrupted) == pytest.approx(float(ends[1][mary] - ends[1][john]), abs=1e-4)
    worst = np.abs(data.metric.values - expected).max()
    print(f"largest difference of 420 cells: {worst:.2g}")
    assert worst < 1e-4
    assert (data.metric.values[:, :9] == float(data.corrupted)).all(), "left of the first difference nothing changes"
    effect = (expected - float(data.corrupted)) / (float(data.clean) - float(data.corrupted))
    assert np.abs(data.effect.values - effect).max() < 1e-4
    assert result.headline.startswith("denoise: ")
    plant(monkeypatch, CausalTrunk, "layer")
    planted = rs.patch_activations(smollm2, *IOI, metric, layers=28, positions=[-1]).data.metric.values
    assert abs(float(planted.squeeze()) - expected[28, 13]) > 1e-4, "and an error of 0.1 % is noticed"


@pytest.mark.parametrize("metric", [rs.loss(), rs.kl_from_base()])
@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_metrics_that_see_the_prompt(direction, metric, name, hf_model, model):
    """A patched run keeps its own next tokens and its own base run, whatever was moved into it."""

    def score(logits, row, ids, base):
        if metric.name == "loss":
            return torch.nn.functional.cross_entropy(logits[:-1], ids[1:])
        return torch.nn.functional.kl_div(
            logits.log_softmax(-1), base.log_softmax(-1), log_target=True, reduction="sum"
        ) / len(ids)

    grid, _ = naive(name, hf_model, model, ["resid_pre", "attn"], direction, score)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if metric.name != "loss" else "error")  # KL is 0 at both ends
        found = rs.patch_activations(model, CLEAN, CORRUPTED, metric, sites=["resid_pre", "attn"], direction=direction)
        whole = rs.patch_activations(model, CLEAN, CORRUPTED, metric, direction=direction, positions="all")
    assert np.nanmax(np.abs(found.data.metric.values - grid)) < 1e-5
    target, donor = (CORRUPTED, CLEAN) if direction == "denoise" else (CLEAN, CORRUPTED)
    for row in range(len(CLEAN)):
        ids = [model.tokenize(prompts[row]).ids for prompts in (target, donor)]
        with torch.no_grad():
            base, moved = (by_hooks(name, hf_model, each).logits for each in ids)
        assert np.abs(whole.data.metric.values[row] - float(score(moved, row, ids[0][0], base))).max() < 1e-5


def test_directions_are_mirror_images(model):
    """Denoising one pair is noising the pair that is the other way round."""
    denoised = rs.patch_activations(model, CLEAN, CORRUPTED, METRIC).data
    noised = rs.patch_activations(model, CORRUPTED, CLEAN, METRIC, direction="noise").data
    assert np.nanmax(np.abs(denoised.metric.values - noised.metric.values)) < 1e-6
    assert np.nanmax(np.abs(denoised.effect.values - noised.effect.values)) < 1e-4
    assert (denoised.clean.values == noised.corrupted.values).all()


# Case 7


@pytest.mark.parametrize("kind", ["resid_pre", "resid_mid", "resid_post"])
@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_a_whole_boundary_is_the_other_run(direction, kind, toy):
    """All positions of one boundary: exactly the other run's score, and an effect of exactly 1."""
    result = rs.patch_activations(toy, CLEAN, CORRUPTED, METRIC, sites=kind, positions="all", direction=direction)
    assert result.data.metric.dims == ("prompt", "site", "layer")
    end = result.data.clean if direction == "denoise" else result.data.corrupted
    assert (result.data.metric == end).all()
    assert (result.data.effect == 1).all()


@pytest.mark.parametrize("kind", ["attn", "mlp"])
def test_whole_writes_are_the_naive_loop(kind, name, hf_model, model):
    found = rs.patch_activations(model, CLEAN, CORRUPTED, METRIC, sites=kind, positions="all").data.metric.values
    for row, layer in product(range(len(CLEAN)), range(LAYERS)):
        site = f"{layer}.{kind}"
        ids = [model.tokenize(prompts[row]).ids for prompts in (CLEAN, CORRUPTED)]
        with torch.no_grad():
            donor = by_hooks(name, hf_model, ids[0]).values[site][None]
            expected = difference(by_hooks(name, hf_model, ids[1], {site: lambda value, d=donor: d}).logits, row)
        assert abs(found[row, 0, layer] - float(expected)) < 2e-6


def test_a_patch_with_itself_changes_nothing(model):
    """Each cell is the base score, bit for bit; nothing is to be restored, which is said once."""
    with pytest.warns(UserWarning, match="clean and corrupted runs have the same metric") as caught:
        result = rs.patch_activations(model, CLEAN, CLEAN, METRIC, sites=kinds_of_model(model))
    assert len(caught) == 1
    assert "for prompts [0, 1, 2]" in str(caught[0].message)
    data = result.data
    assert ((data.metric == data.clean) | data.metric.isnull()).all()
    assert (data.clean == data.corrupted).all()
    assert (data.metric.isnull().sum("position") == 5 - data.length).all()


def kinds_of_model(model):
    return [
        kind
        for kind in ("resid_pre", "resid_mid", "resid_post", "attn", "mlp")
        if model.layout == "sequential" or kind != "resid_mid"
    ]


def test_undefined_effects_are_flagged_and_safe(toy, tmp_path):
    """Case 9: NaN, one warning, and still a file, a table and a headline; the pairs that differ are not touched."""
    corrupted = [CLEAN[0], *CORRUPTED[1:]]
    with pytest.warns(UserWarning, match=r"for prompts \[0\]") as caught:
        result = rs.patch_activations(toy, CLEAN, corrupted, METRIC)
    assert len(caught) == 1
    assert result.data.effect.sel(prompt=0).isnull().all()
    assert result.data.metric.sel(prompt=0).notnull().all()
    apart_from = rs.patch_activations(toy, CLEAN[1:], corrupted[1:], rs.logit_diff([5, 6], 7)).data.effect
    assert np.nanmax(np.abs(result.data.effect.values[1:, ..., :4] - apart_from.values)) < 1e-4
    assert "nan" not in result.headline.lower()
    with pytest.warns(UserWarning, match="same metric"):
        nothing = rs.patch_activations(toy, CLEAN[0], CLEAN[0], rs.logit_diff(4, 7))
    assert nothing.headline == "clean and corrupted runs have the same metric, so no effect is defined"
    for each in (result, nothing):
        json.dumps(each.settings, allow_nan=False)
        opened = rs.open_result(each.save(tmp_path / "patching"))
        assert opened.data.identical(each.data)
        assert opened.headline == each.headline


# Positions and layers


@pytest.mark.parametrize("positions", [[-1], [0, -1], [-2, 1, -1], [2, 2, 0]])
def test_listed_positions_are_columns_of_the_grid(positions, model):
    kinds = kinds_of_model(model)
    whole = rs.patch_activations(model, CLEAN, CORRUPTED, METRIC, sites=kinds).data
    some = rs.patch_activations(model, CLEAN, CORRUPTED, METRIC, sites=kinds, positions=positions).data
    listed = list(dict.fromkeys(positions))
    assert list(some.position.values) == listed
    for row, column in product(range(len(CLEAN)), range(len(listed))):
        length = int(some.length[row])
        expected = whole.metric.isel(prompt=row, position=listed[column] % length)
        assert np.abs(some.metric.isel(prompt=row, position=column) - expected).max() < 1e-6
        assert some.token.values[row, column] == CLEAN[row].split()[listed[column]]
        assert some.corrupted_token.values[row, column] == CORRUPTED[row].split()[listed[column]]


@pytest.mark.parametrize(("layers", "chosen"), [(1, [1]), (-1, [2]), ([2, 0], [2, 0]), ([1, 1, -2], [1])])
def test_listed_layers_are_rows_of_the_grid(layers, chosen, toy):
    whole = rs.patch_activations(toy, CLEAN, CORRUPTED, METRIC, sites=["mlp", "resid_pre", "mlp"]).data
    some = rs.patch_activations(toy, CLEAN, CORRUPTED, METRIC, sites=["mlp", "resid_pre"], layers=layers).data
    assert list(some.layer.values) == chosen
    assert list(some.site.values) == list(whole.site.values) == ["mlp", "resid_pre"]
    assert np.nanmax(np.abs(some.metric.values - whole.metric.sel(layer=chosen).values)) < 1e-6


def test_labels(toy):
    result = rs.patch_activations(toy, CLEAN, CORRUPTED, METRIC)
    assert result.data.effect.dims == ("prompt", "site", "layer", "position")
    assert result.data.token.values[1].tolist() == ["w9", "w8", "w7", "", ""]
    assert result.data.corrupted_token.values[1].tolist() == ["w9", "w4", "w7", "", ""]
    assert result.data.length.values.tolist() == [5, 3, 4]
    assert result.settings == {
        "direction": "denoise",
        "metric": "logit difference of 3 answers - 7",
        "units": "logits",
        "positions": "each",
        "window": 1,
        "sign": "effect = (metric - corrupted) / (clean - corrupted): 1 restores the clean value, 0 does nothing",
    }
    assert (result.measure, result.model) == ("patch_activations", "toy")
    best = result.data.mean_effect
    best = best.isel(best.argmax(...))
    assert f"{int(best.layer)}.resid_pre at position {int(best.position)}" in result.headline
    assert f"restores {float(best):.0%}" in result.headline
    assert "of the gap" in result.headline


def test_a_function_as_metric(toy):
    clean, corrupted = CLEAN[0], CORRUPTED[0]
    by_name = rs.patch_activations(toy, clean, corrupted, rs.logit_diff(4, 7)).data
    by_function = rs.patch_activations(toy, clean, corrupted, lambda z: z[:, -1, 4] - z[:, -1, 7]).data
    assert np.abs(by_name.metric.values - by_function.metric.values).max() < 1e-6


@pytest.mark.parametrize("tokens", [1, 17])
def test_chunks_change_nothing(tokens, toy, monkeypatch):
    whole = rs.patch_activations(toy, CLEAN, CORRUPTED, METRIC, sites=kinds_of_model(toy)).data
    monkeypatch.setattr("resstream.stream.run.TOKENS_PER_CHUNK", tokens)
    some = rs.patch_activations(toy, CLEAN, CORRUPTED, METRIC, sites=kinds_of_model(toy)).data
    assert np.nanmax(np.abs(whole.metric.values - some.metric.values)) < 1e-6


def test_a_repeated_sweep_is_bit_equal(model):
    """Case 25."""
    first = rs.patch_activations(model, CLEAN, CORRUPTED, METRIC).data
    rs.patch_activations(model, CLEAN[::-1], CORRUPTED[::-1], rs.loss())
    assert rs.patch_activations(model, CLEAN, CORRUPTED, METRIC).data.identical(first)


@pytest.mark.parametrize("method", ["layer", "readout"])
def test_the_check_notices_a_planted_error(method, toy, monkeypatch):
    plant(monkeypatch, CausalTrunk if method == "layer" else CausalLM, method)
    check = rs.patch_activations(toy, CLEAN, CORRUPTED, METRIC).check
    assert not check.passed
    assert check.name == "base run = the model's own logits"


# Errors


def test_prompts_of_different_lengths(smollm2):
    """Case 8: both token lists are shown, and nothing is cut."""
    longer = IOI[1].replace("Mary gave", "Mary then gave")
    with pytest.raises(PromptError) as error:
        rs.patch_activations(smollm2, IOI[0], longer, rs.logit_diff(" Mary", " John"))
    clean, corrupted = (
        [smollm2.tokenizer.decode([t]) for t in smollm2.tokenizer(p)["input_ids"]] for p in (IOI[0], longer)
    )
    assert says(
        error,
        "pair 0 does not align",
        "14 tokens",
        "15",
        f"clean:     {clean}",
        f"corrupted: {corrupted}",
        "rephrase one",
    )


def test_unpaired_prompts(toy):
    with pytest.raises(PromptError) as error:
        rs.patch_activations(toy, CLEAN, CORRUPTED[:2], METRIC)
    assert says(error, "3 clean prompts", "2 corrupted ones", "give them in pairs")


WRONG = {
    "kind": (
        {"sites": "resid"},
        SiteError,
        'sites="resid"',
        "is not a kind of place to patch",
        "choose from 'resid_pre'",
    ),
    "site": ({"sites": ["1.attn"]}, SiteError, 'sites="1.attn"', "is not a kind of place", "layers with layers=[...]"),
    "no kind": ({"sites": []}, SiteError, "no sites to patch", "choose from 'resid_pre'"),
    "layer": ({"layers": 3}, SiteError, "no layer 3", "toy has layers 0-2", "did you mean 2?"),
    "layers": ({"layers": "all"}, SiteError, 'layers="all"', "is not a choice of layers", 'write layers="each"'),
    "no layers": ({"layers": []}, SiteError, "no layers to patch", 'write layers="each"'),
    "position": (
        {"positions": [4]},
        PromptError,
        "no position 4",
        "prompt 1 has 3 tokens ['w9', 'w8', 'w7']",
        "use -3 to 2",
    ),
    "positions": ({"positions": "every"}, PromptError, "'every'", "prompt 0"),
    "window": ({"window": 0}, SiteError, "window=0 patches no layer", "write 1"),
    "axes": ({"sites": ["attn", "z"]}, SiteError, "do not share their axes", "two calls"),
    "no heads": ({"heads": [0]}, SiteError, "heads=[0] needs sites that have heads", "got 'resid_pre'"),
    "head": ({"sites": "z", "heads": [4]}, SiteError, "no head 4", "toy has heads 0-3 at 'z'"),
    "heads": ({"sites": "z", "heads": "some"}, SiteError, 'heads="some"', 'write "each", "all"'),
    "no positions": ({"positions": []}, PromptError, "no positions to patch", 'write positions="each"'),
    "direction": (
        {"direction": "both"},
        SiteError,
        'direction="both"',
        "is not a way to patch",
        'write "denoise" or "noise"',
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_choice(case, toy):
    options, kind, *parts = WRONG[case]
    with unchecked(), pytest.raises(kind) as error:
        rs.patch_activations(toy, CLEAN, CORRUPTED, METRIC, **options)
    assert says(error, *parts)


def test_a_parallel_stream_has_no_middle():
    model = rs.load(ARCHITECTURES["neox_parallel"](), name="neox", tokenizer=tokenizer())
    with pytest.raises(SiteError) as error:
        rs.patch_activations(model, CLEAN, CORRUPTED, METRIC, sites=["attn", "resid_mid"])
    assert says(error, "resid_mid", "in neox attention and MLP read the same input", 'use "0.resid_pre"')


def test_answers_for_another_number_of_pairs(toy):
    with pytest.raises(MetricError) as error:
        rs.patch_activations(toy, CLEAN, CORRUPTED, rs.logit_diff([1, 2], 7))
    assert says(error, "2 answers", "for 3 prompts", "one for each prompt")


def test_the_model_is_as_it_was(name):
    """Case 1: a model in training mode; clean = corrupted has no effect at all, and the flags stay."""
    hf_model = ARCHITECTURES[name]().train()
    model = rs.load(hf_model, tokenizer=tokenizer())
    before = state_of(hf_model)
    with pytest.warns(UserWarning, match="same metric"):
        data = rs.patch_activations(model, CLEAN[0], CLEAN[0], rs.logit_diff(4, 7), sites=kinds_of(name)).data
    assert (data.metric == data.clean).all()
    assert state_of(hf_model) == before

    def fail(*_):
        raise Planted

    blocks_of(hf_model)[1].register_forward_pre_hook(fail)
    before = state_of(hf_model)
    with pytest.raises(Planted):
        rs.patch_activations(model, CLEAN, CORRUPTED, METRIC)
    assert state_of(hf_model) == before


def test_the_oracle_itself_is_a_plain_run(name, hf_model, model):
    ids = model.tokenize(CLEAN[0]).ids
    with torch.no_grad():
        assert apart(by_hooks(name, hf_model, ids).logits, hf_model(input_ids=ids).logits[0]) < CLOSE
