"""A suffix run on the keys and values of a base run, against plain hooks on the full width of the untouched model."""

from __future__ import annotations

import pydoc_data.topics
import weakref
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from models.test_load import bridge_of
from tiny import SUPPORTED, apart, blocks_of, hooked, some_ids, state_of

import resstream as rs
from resstream.errors import PromptError, UnsupportedModelError
from resstream.models import load
from resstream.models.left_cache import _Continue
from resstream.models.left_context import LeftContext
from resstream.models.left_probe import suffixes_agree
from resstream.models.tokens import Tokens
from resstream.models.trunk import TOLERANCE
from resstream.sites import Site

CLOSE = TOLERANCE[torch.float32]
LENGTHS = {"unpadded": (12, 12, 12), "padded": (12, 5, 9)}  # longer than the windows of the models that have one
STARTS = (1, 4, 10)
PROMPTS = (2, 0, 1, 0)
ON_BRIDGES = {"bloom"}  # the others' bridges pass by the cache that they are given, or hook their own norms

few_architectures = pytest.mark.parametrize("name", ["gpt2", "gptneo", "gemma3", "bloom", "falcon_new"], indirect=True)


@pytest.fixture(scope="module", params=SUPPORTED)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def hf_model(name):
    return SUPPORTED[name]()


@pytest.fixture(scope="module")
def model(name, hf_model):
    return load(hf_model, name=name)


def batch(lengths, seed=0):
    """Random prompts that differ from their first token on, padded on the right."""
    ids = some_ids(len(lengths), max(lengths), seed=seed)
    ids[:, 0] = torch.arange(len(lengths))
    return Tokens(ids, lengths, tuple(tuple(map(str, row[:n])) for row, n in zip(ids.tolist(), lengths, strict=True)))


@contextmanager
def entering(hf_model, x):
    """Let the first block read another stream, from some position on, in passes of full width."""

    def put(_, args, kwargs):
        stream = args[0] if args else kwargs["hidden_states"]
        changed = torch.cat([stream[:, : -x.shape[1]], x], dim=1)
        return ((changed, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": changed})

    handle = blocks_of(hf_model)[0].register_forward_pre_hook(put, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def suffix_of(model, tokens, prompts, start):
    """The trunk of a suffix, and the tokens of its rows, for one base run of all prompts."""
    base = model.trunk(tokens, keep=True)
    with torch.no_grad():
        base.run()
    rows = tokens.take(prompts)
    return model.trunk(rows, left=base.left.take(prompts, until=start)), rows


@torch.no_grad()
def suffixes_are_the_full_width(hf_model, model, tokens, start, prompts=PROMPTS, close=CLOSE):
    suffix, rows = suffix_of(model, tokens, prompts, start)
    mask, real = rows.mask.long() if rows.padded else None, rows.mask[:, start:]
    plain = hooked(hf_model, rows.ids, mask)
    assert suffix.tokens is rows
    assert apart(suffix.x0[real], plain.inputs[0][:, start:][real]) < close
    noise = torch.randn(suffix.x0.shape, generator=torch.Generator().manual_seed(start)).to(suffix.x0)
    x = suffix.x0 + noise * suffix.x0.std()
    with entering(hf_model, x):
        expected = hooked(hf_model, rows.ids, mask)
    for layer in suffix.order:
        pre, post = (states[layer][:, start:] for states in (expected.inputs, expected.outputs))
        assert apart(x[real], pre[real]) < close
        mid = pre + suffix.write(Site(layer, "attn"), pre)
        total = mid + suffix.write(Site(layer, "mlp"), mid if model.layout == "sequential" else pre)
        assert apart(total[real], post[real]) < close
        assert apart(suffix.layer(layer, pre)[real], post[real]) < close
        x = suffix.layer(layer, x)
    assert apart(x[real], expected.outputs[-1][:, start:][real]) < close
    assert apart(model.readout(x[real]), expected.logits[:, start:][real]) < close


# Every architecture


def test_every_architecture_reuses_its_left_context(name, model):
    assert model.reuses_left


@pytest.mark.parametrize(("lengths", "start"), [*product(LENGTHS, STARTS)])
def test_a_suffix_is_the_full_width(hf_model, model, lengths, start):
    suffixes_are_the_full_width(hf_model, model, batch(LENGTHS[lengths]), start)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_suffix_is_the_full_width_in_eager_attention(name, lengths):
    hf_model = SUPPORTED[name](attn_implementation="eager")
    assert hf_model.config._attn_implementation == "eager"
    suffixes_are_the_full_width(hf_model, load(hf_model), batch(LENGTHS[lengths]), 10)


def test_the_model_is_as_it_was(hf_model, model):
    before = state_of(hf_model)
    suffix, _ = suffix_of(model, batch((12, 5, 9)), PROMPTS, 4)
    suffix.run()
    suffix.write(Site(1, "attn"), suffix.x0)
    assert state_of(hf_model) == before
    with pytest.raises(RuntimeError):
        suffix.layer(1, suffix.x0[..., :-1])
    assert state_of(hf_model) == before


# Each planted error must be noticed by these tests, and by the proof that a model makes before it reuses anything.

PLANTED = {
    "keys of a wrong prefix": lambda keys, values: (keys + 0.01 * keys.roll(1, -1), values),
    "values of a wrong prefix": lambda keys, values: (keys, values + 0.01 * values.roll(1, -1)),
    "keys one position off": lambda keys, values: (keys.roll(1, -2), values),
    "values one position off": lambda keys, values: (keys, values.roll(1, -2)),
    "keys of another prompt": lambda keys, values: (keys.roll(1, 0), values),
    "values of another prompt": lambda keys, values: (keys, values.roll(1, 0)),
    "the left of nothing": lambda keys, values: (0 * keys, 0 * values),
}


@pytest.mark.parametrize("error", PLANTED)
@few_architectures
def test_a_planted_error_is_noticed(hf_model, model, monkeypatch, error):
    honest = LeftContext.before
    monkeypatch.setattr(LeftContext, "before", lambda self, layer: PLANTED[error](*honest(self, layer)))
    for lengths in LENGTHS.values():
        with pytest.raises(AssertionError):
            suffixes_are_the_full_width(hf_model, model, batch(lengths), 4)
    assert not suffixes_agree(model)


@few_architectures
def test_positions_that_are_one_off_are_noticed(hf_model, model, monkeypatch):
    monkeypatch.setattr(_Continue, "get_seq_length", lambda self: self.start - 1)
    with pytest.raises((AssertionError, RuntimeError, IndexError, ValueError)):
        suffixes_are_the_full_width(hf_model, model, batch((12, 12, 12)), 4)
    assert not suffixes_agree(model)


@few_architectures
def test_a_window_of_keys_that_is_cut_is_noticed(hf_model, model, monkeypatch):
    monkeypatch.setattr(_Continue, "get_mask_sizes", lambda self, length: (length, self.start))
    honest = LeftContext.before
    monkeypatch.setattr(LeftContext, "before", lambda self, layer: tuple(x[:, :, :0] for x in honest(self, layer)))
    with pytest.raises((AssertionError, RuntimeError)):
        suffixes_are_the_full_width(hf_model, model, batch((12, 12, 12)), 4)
    assert not suffixes_agree(model)


# Precision, gradients, bridges


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral"], indirect=True)
def test_float64_copies_prove_themselves(model):
    wide = model.in_float64()
    assert model.reuses_left
    assert "_suffixes_agree" not in vars(wide)
    assert wide.reuses_left
    suffix, rows = suffix_of(wide, batch((12, 5, 9)), PROMPTS, 4)
    with torch.no_grad():
        found, expected = suffix.run(), wide.trunk(rows).run()[:, 4:]
    assert found.dtype is torch.float64
    assert apart(found[rows.mask[:, 4:]], expected[rows.mask[:, 4:]]) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon_old"])
def test_half_precision_stays_half(name, dtype):
    hf_model = SUPPORTED[name]().to(dtype)
    model = load(hf_model)
    assert model.reuses_left
    base = model.trunk(batch((12, 12, 12)), keep=True)
    base.run()
    assert {kept.dtype for kept in (*base.left.keys.values(), *base.left.values.values())} == {dtype}
    suffixes_are_the_full_width(hf_model, model, batch((12, 5, 9)), 4, close=TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["llama", "gptj"], indirect=True)
def test_gradients_flow_through_the_suffix(model):
    suffix, rows = suffix_of(model, batch((12, 12, 12)), PROMPTS, 4)
    full = model.trunk(rows)
    weights = torch.randn(suffix.x0.shape, generator=torch.Generator().manual_seed(1))
    gradients = []
    for trunk in (suffix, full):
        x = leaf = trunk.x0.detach().requires_grad_()
        for layer in trunk.order:
            x = trunk.layer(layer, x)
        gradients.append(torch.autograd.grad((x[:, -8:] * weights).sum(), leaf)[0][:, -8:])
    assert apart(*gradients) < CLOSE


@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom", "phi"])
def test_a_bridge_reuses_its_left_context_only_where_that_is_proven(name):
    hf_model = SUPPORTED[name]()
    model = load(bridge_of(SUPPORTED[name]()))
    assert model.reuses_left is (name in ON_BRIDGES)
    if model.reuses_left:
        suffixes_are_the_full_width(hf_model, model, batch((12, 5, 9)), 4)
    else:
        with pytest.raises(UnsupportedModelError, match="open it at full width"):
            model.trunk(batch((12, 5, 9)), keep=True)


# What it refuses


@pytest.fixture(scope="module")
def llama():
    return load(SUPPORTED["llama"](), name="llama")


@pytest.fixture(scope="module")
def left(llama):
    base = llama.trunk(batch((12, 5, 9)), keep=True)
    with torch.no_grad():
        base.run()
    return base.left


def test_without_a_left_context_the_trunk_is_plain(llama, left):
    tokens = batch((12, 5, 9))
    assert llama.trunk(tokens).left is None
    plain = llama.trunk(tokens, left=left.take([0, 1, 2], until=0))
    assert torch.equal(plain.run(), llama.trunk(tokens).run())
    assert torch.equal(llama.trunk(tokens, keep=True).run(), llama.trunk(tokens).run())


def test_rows_of_other_prompts_are_refused(llama, left):
    tokens = batch((12, 5, 9))
    with pytest.raises(PromptError, match=r"row 1 does not begin as prompt 2 of the base run does"):
        llama.trunk(tokens.take([0, 1]), left=left.take([0, 2], until=4))
    with pytest.raises(PromptError, match="row 0 does not begin as prompt 1"):
        llama.trunk(batch((12, 12, 12)).take([1]), left=left.take([1], until=8))
    with pytest.raises(PromptError, match="the left context has 2 rows, but the batch has 1"):
        llama.trunk(tokens.take([0]), left=left.take([0, 0], until=4))
    with pytest.raises(PromptError, match="the batch is 9 tokens wide, but the base run was 12"):
        llama.trunk(batch((9, 9, 9)), left=left.take([0, 1, 2], until=4))
    with pytest.raises(PromptError, match="leaves none to run"):
        llama.trunk(tokens, left=left)


def test_tokens_right_of_the_context_may_differ(llama, left):
    tokens = batch((12, 5, 9)).take([0])
    tokens.ids[0, 6:] = some_ids(6, seed=9)
    suffix = llama.trunk(tokens, left=left.take([0], until=6))
    expected = hooked(llama.hf_model, tokens.ids).outputs[-1][:, 6:]
    assert apart(suffix.run().detach(), expected) < CLOSE


def test_what_was_not_kept_is_refused(llama, left):
    with pytest.raises(PromptError, match="no prompt 3: the base run has 3; use 0 to 2"):
        left.take([0, 3], until=2)
    with pytest.raises(PromptError, match="no left context of 13 positions: 12 were kept; use 0 to 12"):
        left.take([0], until=13)
    with pytest.raises(PromptError, match="no left context of 5 positions: 4 were kept"):
        left.take([0], until=4).take([0], until=5)
    with pytest.raises(PromptError, match="keeps no left context of its own"):
        llama.trunk(batch((12, 5, 9)), left=left.take([0, 1, 2], until=2), keep=True)
    tokens = batch((12, 5, 9))
    base = llama.trunk(tokens, keep=True)
    base.layer(0, base.x0)
    suffix = llama.trunk(tokens, left=base.left.take([0, 1, 2], until=2))
    suffix.layer(0, suffix.x0)
    with pytest.raises(PromptError, match=r"no left context for layer 1: the base run has run 0; run every layer"):
        suffix.layer(1, suffix.x0)


def test_what_is_not_proven_is_refused(monkeypatch, left):
    model = load(SUPPORTED["llama"](), name="llama")
    with monkeypatch.context() as planted:
        planted.setattr(_Continue, "get_seq_length", lambda self: self.start - 1)
        assert not model.reuses_left
    for arguments in ({"keep": True}, {"left": left.take([0, 1, 2], until=4)}):
        with pytest.raises(UnsupportedModelError, match="llama is not known to give the same numbers"):
            model.trunk(batch((12, 5, 9)), **arguments)


def test_a_model_that_is_hooked_or_edited_runs_at_full_width(left):
    """A hook may act on a position by its number, which would be another one in a suffix."""
    hf_model = SUPPORTED["llama"]()
    model = load(hf_model)
    assert model.reuses_left
    handle = hf_model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert not model.reuses_left
    handle.remove()
    assert model.reuses_left
    with rs.edited(model, rs.Scale("1.mlp", 0.5)) as edited:
        assert not edited.reuses_left
        for arguments in ({"keep": True}, {"left": left.take([0, 1, 2], until=4)}):
            with pytest.raises(UnsupportedModelError, match="not known to give the same numbers"):
                edited.trunk(batch((12, 5, 9)), **arguments)
        full = edited.trunk(batch((12, 5, 9)), left=left.take([0, 1, 2], until=0), keep=False)
        assert full.x0.shape[1] == 12


# Memory


def test_a_context_stays_what_it_was_when_the_base_runs_again(llama):
    base = llama.trunk(batch((12, 5, 9)), keep=True)
    assert dict(base.left.keys) == {}
    with torch.no_grad():
        base.run()
        left = base.left
        before = [keys.clone() for keys in left.keys.values()]
        for layer in base.order:
            base.layer(layer, base.x0.roll(1, 1))
    assert all(torch.equal(keys, kept) for keys, kept in zip(left.keys.values(), before, strict=True))
    assert not torch.equal(base.left.keys[1], left.keys[1])


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"], indirect=True)
def test_keys_and_values_are_kept_once_a_base_prompt(model):
    """Exactly heads x positions x (keys and values), and none of the queries that they may have been computed with."""
    base = model.trunk(batch((12, 5, 9)), keep=True)
    base.run()
    kv_heads = 2 if model.name == "llama" else 4
    assert base.left.nbytes == model.n_layers * 3 * 12 * kv_heads * 8 * 2 * 4
    tensors = [*base.left.keys.values(), *base.left.values.values()]
    assert sum(kept.untyped_storage().nbytes() for kept in tensors) == base.left.nbytes
    many = base.left.take([0] * 1000, until=3)
    assert many.nbytes == base.left.nbytes
    assert [keys.data_ptr() for keys in many.keys.values()] == [keys.data_ptr() for keys in base.left.keys.values()]


def test_what_is_gathered_for_the_rows_goes_when_a_layer_has_run(llama, monkeypatch):
    gathered, honest = [], LeftContext.before

    def before(self, layer):
        assert not [kept for kept in gathered if kept() is not None]
        found = honest(self, layer)
        gathered.extend(map(weakref.ref, found))
        return found

    monkeypatch.setattr(LeftContext, "before", before)
    suffix, _ = suffix_of(llama, batch((12, 5, 9)), PROMPTS, 4)
    with torch.no_grad():
        suffix.run()
    assert len(gathered) == 2 * llama.n_layers


# The embedded default


def test_smollm2_short(smollm2):
    assert smollm2.reuses_left
    tokens = smollm2.tokenize(
        ["When Mary and John went to the store, John gave a drink to", "The Eiffel Tower is in the city of"]
    )
    assert tokens.lengths == (14, 9)
    for start in (1, 10):
        suffixes_are_the_full_width(smollm2.hf_model, smollm2, tokens, start, prompts=(1, 0, 0))


def test_smollm2_long(smollm2):
    text = " ".join(pydoc_data.topics.topics.values())
    tokens = smollm2.tokenize(smollm2.tokenize(text[:4000]).ids[:, :300])
    assert tokens.lengths == (300,)
    suffixes_are_the_full_width(smollm2.hf_model, smollm2, tokens, 290, prompts=(0, 0))
