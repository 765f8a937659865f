"""Patching inside branches, in windows and by selectors, against one plain hooked run for each cell."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from measure.test_patching import CLEAN, CORRUPTED, METRIC, difference, naive
from models.test_inside import HEADS, by_hand, patched
from stream.test_read import CLOSE, by_hooks
from tiny import LAYERS, SUPPORTED, tokenizer

import resstream as rs
from resstream.measure.patches import transplant
from resstream.models.causal_lm import CausalTrunk
from resstream.models.trunk import Trunk
from resstream.stream import rows as rows_module
from resstream.stream.memory import peak_bytes

NAMES = ("gpt2", "llama", "neox_parallel", "gemma2", "falcon_new")


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def hf_model(name):
    return SUPPORTED[name]()


@pytest.fixture(scope="module")
def model(name, hf_model):
    return rs.load(hf_model, name=name, tokenizer=tokenizer())


@pytest.fixture(scope="module")
def toy():
    return rs.load(SUPPORTED["llama"](), name="toy", tokenizer=tokenizer())


def by_plain_hooks(name, hf_model, model, kind, direction="denoise", positions="all"):
    """The grid of heads, a hooked run of the untouched model for each cell."""
    ids = [[model.tokenize(prompt).ids for prompt in pair] for pair in zip(CLEAN, CORRUPTED, strict=True)]
    heads = model.parts[kind]
    width = 1 if positions == "all" else max(each[0].shape[1] for each in ids)
    grid = np.full((len(CLEAN), LAYERS, heads, width), np.nan)
    for row, pair in enumerate(ids):
        target, donor = pair[::-1] if direction == "denoise" else pair
        others = by_hand(name, hf_model, donor, kind)
        for layer, head, position in product(range(LAYERS), range(heads), range(width)):
            if position >= target.shape[1]:
                continue

            def change(own, layer=layer, head=head, position=position, others=others):
                new = own.clone()
                here = slice(None) if positions == "all" else position
                new[:, here, head] = others[layer][:, here, head]
                return new

            with torch.no_grad():
                logits = patched(name, hf_model, target, kind, layer, change)[0]
            grid[row, layer, head, position] = difference(logits, row)
    return grid


def the_heads_are_plain_hooks(name, hf_model, model, kind, **options):
    expected = by_plain_hooks(name, hf_model, model, kind, **options)
    positions = options.get("positions", "all")
    result = rs.patch_activations(model, CLEAN, CORRUPTED, METRIC, sites=kind, **{"positions": positions, **options})
    found = result.data.metric.isel(site=0).values
    found = found[..., None] if positions == "all" else found
    assert (np.isnan(found) == np.isnan(expected)).all()
    assert np.nanmax(np.abs(found - expected)) < 4 * CLOSE
    assert np.nanmax(np.abs(expected - result.data.corrupted.values[:, None, None, None])) > 1e-4


@pytest.mark.parametrize("kind", ["z", "q", "k", "v"])
def test_heads_are_plain_hooks(kind, name, hf_model, model):
    the_heads_are_plain_hooks(name, hf_model, model, kind)


@pytest.mark.parametrize("name", ["llama", "gemma2"], indirect=True)
def test_heads_by_position_are_plain_hooks(name, hf_model, model):
    the_heads_are_plain_hooks(name, hf_model, model, "z", positions="each", direction="noise")


@pytest.mark.parametrize("name", ["llama", "neox_parallel"], indirect=True)
@pytest.mark.parametrize("plant", ["head", "layer"])
def test_heads_that_are_off_are_noticed(plant, name, hf_model, model, monkeypatch):
    """The twin of the tests above: another head is taken, or values are put a layer too high."""
    real = transplant._value

    def another(base, site, prompt):
        if plant == "head":
            return real(base, rs.sites.Site(site.layer, site.kind, (site.part + 1) % HEADS), prompt)
        return real(base, rs.sites.Site((site.layer + 1) % LAYERS, site.kind, site.part), prompt)

    monkeypatch.setattr(transplant, "_value", another)
    with pytest.raises(AssertionError):
        the_heads_are_plain_hooks(name, hf_model, model, "z")


def test_a_head_is_patched_as_its_z(toy):
    options = {"positions": "all", "heads": [1, 3]}
    z, head = (rs.patch_activations(toy, CLEAN, CORRUPTED, METRIC, sites=kind, **options) for kind in ("z", "head"))
    assert np.array_equal(z.data.metric, head.data.metric)
    assert head.data["head"].values.tolist() == [1, 3]


def test_neurons_are_plain_hooks(name, hf_model, model):
    found = rs.patch_activations(
        model, CLEAN[0], CORRUPTED[0], rs.logit_diff(4, 7), sites="neuron", neurons=[0, 17], positions="all"
    )
    ids = [model.tokenize(prompts[0]).ids for prompts in (CLEAN, CORRUPTED)]
    others = by_hand(name, hf_model, ids[0], "neuron")
    for layer, (column, neuron) in product(range(LAYERS), enumerate([0, 17])):

        def change(own, layer=layer, neuron=neuron):
            new = own.clone()
            new[..., neuron] = others[layer][..., neuron]
            return new

        with torch.no_grad():
            logits = patched(name, hf_model, ids[1], "neuron", layer, change)[0]
        assert abs(float(found.data.metric[0, 0, layer, column]) - float(difference(logits, 0))) < 4 * CLOSE
    every = rs.patch_activations(model, CLEAN[0], CORRUPTED[0], rs.logit_diff(4, 7), sites="neuron", positions="all")
    mlp = rs.patch_activations(model, CLEAN[0], CORRUPTED[0], rs.logit_diff(4, 7), sites="mlp", positions="all")
    assert every.data.metric.dims == mlp.data.metric.dims
    assert np.abs(every.data.metric.values - mlp.data.metric.values).max() < 4 * CLOSE, (
        "all neurons are the whole write"
    )


def test_all_heads_together_are_the_whole_write(model):
    options = {"positions": "each", "direction": "noise"}
    heads = rs.patch_activations(model, CLEAN, CORRUPTED, METRIC, sites="z", heads="all", **options).data.metric
    write = rs.patch_activations(model, CLEAN, CORRUPTED, METRIC, sites="attn", **options).data.metric
    assert heads.dims == write.dims
    assert np.nanmax(np.abs(heads.values - write.values)) < 4 * CLOSE


def test_a_pattern_is_the_edit_of_that_pattern(toy):
    """At one query, against `rs.edited`, whose patterns have oracles of their own."""
    found = rs.patch_activations(
        toy, CLEAN[0], CORRUPTED[0], rs.logit_diff(4, 7), sites="pattern", positions=["last"]
    ).data.metric
    for layer, head in product(range(LAYERS), range(HEADS)):
        site = f"{layer}.pattern.{head}"
        clean = rs.read(toy, CLEAN[0], sites=[site])[site]

        def put(own, _, clean=clean):
            new = own.clone()
            new[..., -1, :] = clean[..., -1, :]
            return new

        with rs.edited(toy, rs.Apply(site, put)) as edited, torch.no_grad():
            expected = difference(edited.logits(CORRUPTED[0])[0], 0)
        assert abs(float(found[0, 0, layer, head, 0]) - float(expected)) < 4 * CLOSE


def test_fewer_keys_than_queries(toy):
    """Case 5: the axis has as many heads as the queries; a key head that is not there is no cell."""
    data = rs.patch_activations(toy, CLEAN, CORRUPTED, METRIC, sites=["q", "k"], positions="all").data
    assert data.sizes["head"] == HEADS
    assert bool(data.metric.sel(site="k", head=[2, 3]).isnull().all())
    assert bool(data.metric.sel(site="q").notnull().all())
    with pytest.raises(rs.SiteError, match="no head 2: toy has heads 0-1 at 'k'"):
        rs.patch_activations(toy, CLEAN, CORRUPTED, METRIC, sites="k", heads=[2])


def window_by_hooks(name, hf_model, model, kind, layer, window):
    """Each pair's metric with a kind replaced at all positions of several layers."""
    found = []
    for row, pair in enumerate(zip(CLEAN, CORRUPTED, strict=True)):
        donor, target = (model.tokenize(prompt).ids for prompt in pair)
        first = layer - (window - 1) // 2
        span = range(max(0, first), min(LAYERS, first + window))
        with torch.no_grad():
            seen = by_hooks(name, hf_model, donor).values
            changes = {
                f"{each}.{kind}": (lambda value, other=seen[f"{each}.{kind}"]: other.expand_as(value)) for each in span
            }
            found.append(float(difference(by_hooks(name, hf_model, target, changes).logits, row)))
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama", "neox_parallel", "gemma2"], indirect=True)
@pytest.mark.parametrize("kind", ["resid_pre", "attn", "mlp", "resid_post"])
def test_windows_are_plain_hooks(kind, name, hf_model, model):
    data = rs.patch_activations(model, CLEAN, CORRUPTED, METRIC, sites=kind, window=2, positions="all").data
    for layer in range(LAYERS):
        expected = window_by_hooks(name, hf_model, model, kind, layer, 2)
        assert np.abs(data.metric[:, 0, layer].values - expected).max() < 4 * CLOSE
    alone = rs.patch_activations(model, CLEAN, CORRUPTED, METRIC, sites=kind, positions="all").data
    if kind in ("attn", "mlp"):
        assert np.abs(data.metric - alone.metric).max() > 1e-4, "two layers are not one"


def test_windows_by_position_patch_every_layer_there(toy):
    """A state that a lower patch has changed is put back by the upper one."""
    data = rs.patch_activations(toy, CLEAN, CORRUPTED, METRIC, sites="resid_pre", window=LAYERS).data
    last = rs.patch_activations(toy, CLEAN, CORRUPTED, METRIC, sites="resid_pre").data
    grid, _ = naive("llama", toy.hf_model, toy, ["resid_pre"], "denoise")
    assert np.nanmax(np.abs(last.metric.values - grid)) < 4 * CLOSE
    assert not np.allclose(data.metric.values, last.metric.values, atol=1e-4, equal_nan=True)


def test_selectors(toy):
    options = {"sites": "resid_pre", "layers": [1]}
    data = rs.patch_activations(
        toy, CLEAN[0], CORRUPTED[0], METRIC.take([0]), positions=["last", -2, "w2"], **options
    ).data
    each = rs.patch_activations(toy, CLEAN[0], CORRUPTED[0], METRIC.take([0]), **options).data
    assert data.position.values.tolist() == ["last", "-2", "w2"]
    assert data.token.values.tolist() == [["w5", "w4", "w2"]]
    assert data.corrupted_token.values.tolist() == [["w2", "w4", "w6"]]
    assert np.allclose(data.metric.values[0, 0, 0], each.metric.values[0, 0, 0][[4, 3, 1]], atol=1e-6)


def test_several_metrics_are_each_of_them(toy):
    metrics = [METRIC, rs.log_prob(3), rs.loss()]
    together = rs.patch_activations(toy, CLEAN, CORRUPTED, metrics)
    assert together.data.metric.dims == ("prompt", "metric_name", "site", "layer", "position")
    assert together.data.metric_name.values.tolist() == [metric.name for metric in metrics]
    for metric in metrics:
        alone = rs.patch_activations(toy, CLEAN, CORRUPTED, metric).data
        for variable in ("metric", "mean_effect", "clean"):
            found = together.data[variable].sel(metric_name=metric.name)
            assert np.allclose(found, alone[variable], atol=1e-6, equal_nan=True)


def test_pairs_together_are_each_pair_alone(model):
    """Bit for bit, whatever the lengths of the others: no pair is padded."""
    together = rs.patch_activations(model, CLEAN, CORRUPTED, METRIC, sites="resid_pre").data.metric
    for pair, (clean, corrupted) in enumerate(zip(CLEAN, CORRUPTED, strict=True)):
        alone = rs.patch_activations(model, clean, corrupted, METRIC.take([pair]), sites="resid_pre").data.metric
        assert np.array_equal(together[pair, ..., : alone.sizes["position"]], alone[0])


def test_a_sweep_keeps_to_its_memory(smollm2):
    """The peak of all tensors that a sweep makes stays below what it was given, and the numbers stay."""
    clean = [
        f"When Mary and John went to the {place}, John gave a drink to" for place in ("store", "old market", "sea")
    ]
    corrupted = [text.replace("John gave", "Mary gave") for text in clean]
    metric = rs.logit_diff(" Mary", " John")
    options = {"layers": [4, 26], "sites": "resid_pre"}
    wide = rs.patch_activations(smollm2, clean, corrupted, metric, **options).data.metric
    found = {}
    for budget in (2**24, 2**26):
        peak = peak_bytes(
            lambda budget=budget: found.update(
                {budget: rs.patch_activations(smollm2, clean, corrupted, metric, memory=budget, **options)}
            )
        )
        assert peak < budget
        assert np.nanmax(np.abs(found[budget].data.metric - wide)) < 1e-4


def test_mean_effect_is_the_mean_change_over_the_mean_gap(toy):
    data = rs.patch_activations(toy, CLEAN, CORRUPTED, METRIC, positions="all").data
    change = (data.metric - data.corrupted).mean("prompt")
    gap = (data.clean - data.corrupted).mean()
    assert np.allclose(data.mean_effect, change / gap)
    assert bool((data.effect_low <= data.mean_effect).all() and (data.mean_effect <= data.effect_high).all())
    one = rs.patch_activations(toy, CLEAN[0], CORRUPTED[0], METRIC.take([0]), positions="all").data
    assert "effect_low" not in one, "one pair has no interval"
    assert np.allclose(one.mean_effect, one.effect[0])


@pytest.mark.parametrize("where", ["first", "reuse"])
def test_shortcuts_change_nothing(where, model, monkeypatch):
    """Trunks of the first rows, and what stands to the left of a change, against running it all."""
    quick = rs.patch_activations(model, CLEAN, CORRUPTED, METRIC, sites="resid_pre").data.metric
    if where == "first":
        monkeypatch.setattr(CausalTrunk, "first", Trunk.first)
    else:
        of = rows_module.Base.of.__func__

        def forgetful(cls, model, tokens, sites=()):
            base = of(cls, model, tokens, sites)
            return cls(base.tokens, base.values, base.final)

        monkeypatch.setattr(rows_module.Base, "of", classmethod(forgetful))
    slow = rs.patch_activations(model, CLEAN, CORRUPTED, METRIC, sites="resid_pre").data.metric
    assert np.nanmax(np.abs(quick - slow)) < 2 * CLOSE


def test_positions_of_each_pairs_own_stay_with_it(toy):
    """Pairs of unequal lengths are run in another order than they are given in."""
    own = rs.PerPrompt(((1, 4), (1,), (0,)))
    together = rs.patch_activations(toy, CLEAN, CORRUPTED, METRIC, positions=own).data
    for pair, (clean, corrupted) in enumerate(zip(CLEAN, CORRUPTED, strict=True)):
        here = rs.PerPrompt(own.positions[pair : pair + 1])
        alone = rs.patch_activations(toy, clean, corrupted, METRIC.take([pair]), positions=here).data
        assert np.array_equal(together.metric[pair], alone.metric[0])
    assert together.token.values.tolist() == [["w2w5"], ["w8"], ["w3"]]


def test_selectors_of_several_kinds_together(toy, tmp_path):
    """Each is a column of its own, with a name that a file can hold."""
    own, piece = rs.PerPrompt(((1, 4), (1,), (0,))), rs.Substring("w", occurrence=1)
    result = rs.patch_activations(toy, CLEAN, CORRUPTED, METRIC, positions=[own, "last", piece, slice(0, 2)])
    alone = [
        rs.patch_activations(toy, CLEAN, CORRUPTED, METRIC, positions=[each]).data.metric[..., 0]
        for each in (own, "last", piece, slice(0, 2))
    ]
    assert np.allclose(result.data.metric, np.stack(alone, axis=-1), atol=1e-6)
    assert len(set(result.data.position.values.tolist())) == 4
    assert rs.open_result(result.save(tmp_path / "grid")).data.identical(result.data)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_plain_hooks_in_half_precision(dtype):
    """To its own rounding; metrics come out in full precision."""
    hf_model = SUPPORTED["llama"]().to(dtype)
    model = rs.load(hf_model, name="half", tokenizer=tokenizer())
    kinds = ["resid_pre", "attn", "mlp"]
    grid, _ = naive("llama", hf_model, model, kinds, "denoise", lambda logits, row, *_: difference(logits.float(), row))
    data = rs.patch_activations(model, CLEAN, CORRUPTED, METRIC, sites=kinds).data
    found = data.metric.values
    assert found.dtype == np.float64
    moved = np.nanmax(np.abs(grid - data.corrupted.values[:, None, None, None]))
    assert np.nanmax(np.abs(found - grid)) < 4 * torch.finfo(dtype).eps
    assert moved > 40 * torch.finfo(dtype).eps, "and what patches do is far above the rounding"
