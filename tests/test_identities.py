"""The identities that must hold on every model and prompt, drawn at random; each with the error that it must notice."""

from __future__ import annotations

from functools import cache
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from measure.test_paths import METRIC, ToyModel, random_parts, scaled
from models.test_trunk import plant
from stream.test_edits import at
from stream.test_read import ARCHITECTURES, Planted, by_hooks, kinds_of
from tiny import LAYERS, VOCAB, apart, blocks_of, some_ids, state_of, tokenizer

import resstream as rs
from resstream.errors import UnsupportedModelError
from resstream.measure import patching
from resstream.models.causal_lm import CausalLM, CausalTrunk
from resstream.stream import expand
from resstream.stream.edited import EditedTrunk

CLOSE = 1e-5
NAMES = sorted(ARCHITECTURES)
some_examples = settings(max_examples=15, deadline=None, derandomize=True, database=None)
names = st.sampled_from(NAMES)
tokens = st.integers(0, VOCAB - 1)
prompts = st.lists(tokens, min_size=2, max_size=9)
pairs = st.integers(2, 6).flatmap(lambda n: st.tuples(*[st.lists(tokens, min_size=n, max_size=n)] * 2))


@cache
def opened(name):
    """A tiny random model, and the same one loaded."""
    hf_model = ARCHITECTURES[name]()
    return hf_model, rs.load(hf_model, name=name, tokenizer=tokenizer())


def text(ids):
    """A prompt whose tokens are these."""
    return " ".join(f"w{token}" if token < VOCAB - 1 else "<unk>" for token in ids)


def noticed(identity, *arguments, planted):
    """Whether an identity fails once an error of 0.1 % is planted."""
    identity(*arguments)
    with pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch, *planted)
        with pytest.raises(AssertionError):
            identity(*arguments)


# 1. The lens at the last site is the model's logits.


def the_lens_ends_at_the_logits(name, ids, target):
    hf_model, model = opened(name)
    lens = rs.logit_lens(model, text(ids), sites="final", targets=target)
    with torch.no_grad():
        expected = hf_model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)[:, target]
    assert apart(torch.from_numpy(lens.data.log_prob.values[0, 0]), expected) < CLOSE
    assert lens.check.passed


@some_examples
@given(names, prompts, tokens)
def test_1_the_lens_ends_at_the_logits(name, ids, target):
    the_lens_ends_at_the_logits(name, ids, target)


@pytest.mark.parametrize("planted", [(CausalLM, "readout"), (CausalTrunk, "layer")])
def test_1_notices(planted):
    noticed(the_lens_ends_at_the_logits, "gpt2", [3, 1, 4, 1, 5], 9, planted=planted)


# 3. No edit, identity reorder, self-patch, a patch at every position of one boundary: exactly the run that they are.


def what_changes_nothing_is_the_run_itself(name, pair, layer):
    _, model = opened(name)
    ids = torch.tensor(pair)
    with torch.no_grad():
        base = model.logits(ids)
        for edits in ([], [rs.Reorder(range(LAYERS))], [rs.Scale(f"{layer}.resid_post", 1.0)]):
            with rs.edited(model, *edits) as m:
                assert torch.equal(m.logits(ids), base)
        own = rs.read(model, ids, sites=f"{layer}.resid_pre")[f"{layer}.resid_pre"]
        with rs.edited(model, rs.Replace(f"{layer}.resid_pre", own)) as m:
            assert torch.equal(m.logits(ids), base)
    clean, corrupted = map(text, pair)
    whole = rs.patch_activations(
        model, clean, corrupted, rs.log_prob(4), positions="all", sites=["resid_pre", "resid_post"]
    )
    assert (whole.data.metric == whole.data.clean).all()
    assert (rs.ablate_layers(model, clean, layers=[[]], metric=rs.kl_from_base()).data.metric == 0).all()


@some_examples
@given(names, pairs.filter(lambda pair: pair[0] != pair[1]), st.integers(0, LAYERS - 1))
def test_3_what_changes_nothing_is_the_run_itself(name, pair, layer):
    what_changes_nothing_is_the_run_itself(name, pair, layer)


@pytest.mark.parametrize("planted", [(EditedTrunk, "layer"), (patching, "run")])
def test_3_notices(planted):
    noticed(what_changes_nothing_is_the_run_itself, "llama", ([1, 2, 3], [4, 2, 3]), 1, planted=planted)


# 4. A row in a batch equals that row alone; padded equals unpadded; every sweep equals the naive loop of forward hooks.


def a_cell_is_a_plain_run(name, pair, other, kind, layer, direction):
    hf_model, model = opened(name)
    kind = kind if kind in kinds_of(name) else "resid_post"
    site, position = f"{layer}.{kind}", len(pair[0]) - 1
    clean, corrupted = ([text(ids), text(other)] for ids in pair)
    found = rs.patch_activations(model, clean, corrupted, rs.log_prob(7), sites=kind, direction=direction)
    alone = rs.patch_activations(model, clean[0], corrupted[0], rs.log_prob(7), sites=kind, direction=direction)
    target, donor = reversed(pair) if direction == "denoise" else pair
    with torch.no_grad():
        put = by_hooks(name, hf_model, torch.tensor([donor])).values[site][None]
        logits = by_hooks(name, hf_model, torch.tensor([target]), {site: at(position, lambda value: put)}).logits
    expected = float(logits[-1].log_softmax(-1)[7])
    for data in (found.data, alone.data):
        cell = data.metric.isel(prompt=0, site=0).sel(layer=layer, position=position)
        assert abs(float(cell) - expected) < CLOSE
    everything = rs.read(model, [text(pair[0]), text(other)], sites=kinds_of(name))
    with torch.no_grad():
        for row, ids in enumerate((pair[0], other)):
            seen = by_hooks(name, hf_model, torch.tensor([ids]))
            assert apart(everything.logits[row, : len(ids)], seen.logits) < CLOSE
            for place in everything.sites:
                assert apart(everything[place][row, : len(ids)], seen.values[place]) < CLOSE


sites = st.sampled_from(["resid_pre", "resid_mid", "resid_post", "attn", "mlp"])


@pytest.mark.filterwarnings("ignore:clean and corrupted runs have the same metric")
@some_examples
@given(names, pairs, prompts, sites, st.integers(0, LAYERS - 1), st.sampled_from(["denoise", "noise"]))
@example("gemma2", ([1, 1], [1, 1]), [5] * 9, "attn", 1, "noise")
def test_4_a_cell_is_a_plain_run(name, pair, other, kind, layer, direction):
    a_cell_is_a_plain_run(name, pair, other, kind, layer, direction)


@pytest.mark.filterwarnings("ignore:clean and corrupted runs have the same metric")
@pytest.mark.parametrize("planted", [(CausalTrunk, "layer"), (CausalTrunk, "write", "attn"), (CausalLM, "readout")])
@pytest.mark.parametrize("name", ["granite", "gptj"])
def test_4_notices(name, planted):
    noticed(a_cell_is_a_plain_run, name, ([1, 2, 3], [4, 2, 5]), [6, 7], "attn", 1, "denoise", planted=planted)


# 5. Path-length coefficients sum to the autograd gradient; equal scalar Jacobians j give C(n, k) j^k.


def lengths_sum_to_the_gradient(layers, layout, start, unit, seed):
    model = ToyModel(random_parts(layers, "tanh", seed), layout=layout, seed=seed)
    result = rs.path_lengths(
        model, some_ids(1, 3, seed=seed) % 6, METRIC, unit=unit, start=start % layers, samples=0, signs=0
    )
    assert result.check.passed
    assert result.data.completeness.max() < 1e-12
    assert float(result.data.share.sum()) == pytest.approx(1, abs=1e-12 * float(result.data.kappa.max()))


def equal_jacobians_give_the_binomial(layers, factor):
    model = ToyModel([(scaled(factor), scaled(factor))] * layers)
    share = rs.path_lengths(model, some_ids(1, 2) % 6, METRIC, samples=0, signs=0).data.share.values[0]
    terms = np.array([comb(2 * layers, k) * factor**k for k in range(2 * layers + 1)])
    assert np.abs(share - terms / terms.sum()).max() < 1e-12 * np.abs(terms).sum() / terms.sum()


@some_examples
@given(
    st.integers(1, 6),
    st.sampled_from(["sequential", "parallel"]),
    st.integers(0, 5),
    st.sampled_from(["write", "layer"]),
    st.integers(0, 99),
)
def test_5_lengths_sum_to_the_gradient(layers, layout, start, unit, seed):
    lengths_sum_to_the_gradient(layers, layout, start, unit, seed)


@some_examples
@given(st.integers(1, 6), st.floats(-0.5, 1.5).filter(lambda factor: abs(factor) > 0.01))
def test_5_equal_jacobians_give_the_binomial(layers, factor):
    equal_jacobians_give_the_binomial(layers, factor)


def test_5_notices():
    noticed(lengths_sum_to_the_gradient, 3, "parallel", 0, "write", 1, planted=(expand, "pull"))
    noticed(equal_jacobians_give_the_binomial, 3, 0.5, planted=(expand, "pull"))


# 7. After every call, also one that raises, everything is as it was.

IDS = some_ids(2, 4)
CALLS = {
    "load": lambda model: rs.load(model.hf_model),
    "read": lambda model: rs.read(model, IDS, sites=["resid_pre", "attn", "mlp"]),
    "edited": lambda model: logits_of_edits(model, rs.Zero("1.attn"), rs.Mean("2.mlp", IDS), rs.Noise("embed", 0.1)),
    "reorder": lambda model: logits_of_edits(model, rs.Reorder([2, 0, 1])),
    "lens": lambda model: rs.logit_lens(model, IDS),
    "patch": lambda model: rs.patch_activations(model, IDS, IDS.flip(1), rs.loss()),
    "ablate": lambda model: rs.ablate_layers(model, IDS, how="resample", unit="mlp"),
    "paths": lambda model: rs.path_lengths(model, IDS, samples=2),
    "generate": lambda model: model.generate("w1 w2", max_new_tokens=2),
}


def logits_of_edits(model, *edits):
    with rs.edited(model, *edits) as m:
        return m.logits(IDS)


def everything_is_as_it_was(name, call, fails):
    hf_model = ARCHITECTURES[name]().train()
    blocks_of(hf_model)[0].mlp.eval()
    model = rs.load(hf_model, tokenizer=tokenizer())
    own = []

    def users_own(*_):
        own.append(1)
        if fails:
            raise Planted

    blocks_of(hf_model)[1].mlp.register_forward_hook(users_own)
    before = state_of(hf_model)
    if fails:
        with pytest.raises((Planted, UnsupportedModelError)):
            CALLS[call](model)
    else:
        CALLS[call](model)
    assert state_of(hf_model) == before
    assert own, "and the user's own hook has fired"


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_7_everything_is_as_it_was(name, call, fails):
    everything_is_as_it_was(name, call, fails)


@pytest.mark.parametrize(
    "leak",
    [
        lambda model: blocks_of(model.hf_model)[1].register_forward_hook(lambda *_: None),
        lambda model: blocks_of(model.hf_model)[1].eval(),
        lambda model: next(model.hf_model.parameters()).data.mul_(1.001),
        lambda model: torch.rand(1),
    ],
)
def test_7_notices(leak, monkeypatch):
    honest = CALLS["read"]
    monkeypatch.setitem(CALLS, "read", lambda model: (honest(model), leak(model)))
    with pytest.raises(AssertionError):
        everything_is_as_it_was("llama", "read", False)
