"""The opened trunk against plain hooks on the untouched model, and the model as it was after every call."""

from __future__ import annotations

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from tiny import (
    LAYERS,
    PARALLEL,
    SEQUENTIAL,
    SUPPORTED,
    apart,
    blocks_of,
    hooked,
    some_ids,
    state_of,
    tokenizer,
)
from torch import nn

from resstream.errors import UnsupportedModelError
from resstream.models import causal_lm, load
from resstream.models.causal_lm import CausalLM, CausalTrunk
from resstream.models.trunk import TOLERANCE
from resstream.sites import Site

CLOSE = TOLERANCE[torch.float32]
LENGTHS = (12, 5, 9)  # longer than the windows of the models that have one

# Where a block's second branch reads the stream, so that a hook sees resid_mid; OLMo-2 has no norm before its branches.
SECOND_READER = {
    "gpt2": "ln_2",
    "gptneo": "ln_2",
    "opt": "final_layer_norm",
    "xglm": "final_layer_norm",
    "mpt": "norm_2",
    "gemma2": "pre_feedforward_layernorm",
    "gemma3": "pre_feedforward_layernorm",
    "olmo2": "mlp",
}
ATTENTION = {
    "gptj": "attn",
    "neox_parallel": "attention",
    "falcon_old": "self_attention",
    "falcon_new": "self_attention",
}


# Planting errors is the same on every architecture, so these three stand for all.
few_architectures = pytest.mark.parametrize("name", ["gpt2", "granite", "gptj"], indirect=True)


@pytest.fixture(scope="module", params=SUPPORTED)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def hf_model(name):
    return SUPPORTED[name]()


@pytest.fixture(scope="module")
def model(name, hf_model):
    return load(hf_model, name=name, tokenizer=tokenizer())


def plant(monkeypatch, owner, method, kind=None):
    """Put a 0.1 % error, not a mere scale, which norms would undo, on what a method returns; of writes, on one kind."""
    honest = getattr(owner, method)

    def planted(self, *args, **kwargs):
        right = honest(self, *args, **kwargs)
        return right if kind is not None and args[0].kind != kind else right + 0.001 * right.roll(1, -1)

    monkeypatch.setattr(owner, method, planted)


def block_on(hf_model, ids, layer, x):
    """What a block returns in a forward pass in which its input was replaced."""
    seen = []

    def put(_, args, kwargs):
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

    block = blocks_of(hf_model)[layer]
    handles = [
        block.register_forward_pre_hook(put, with_kwargs=True),
        block.register_forward_hook(lambda _, args, output: seen.append(output)),
    ]
    try:
        with torch.no_grad():
            hf_model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return seen[0] if isinstance(seen[0], torch.Tensor) else seen[0][0]


def logits_after(hf_model, ids, x):
    """The logits of a forward pass in which the last block's output was replaced."""

    def put(_, args, output):
        return x if isinstance(output, torch.Tensor) else (x, *output[1:])

    handle = blocks_of(hf_model)[-1].register_forward_hook(put)
    try:
        return hf_model(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()


def seen_at(hf_model, ids, path, of):
    """What each block's submodule of a name reads ("input") or returns ("output")."""
    seen = []

    def look(_, args, kwargs, output):
        read = args[0] if args else kwargs["hidden_states"]
        returned = output if isinstance(output, torch.Tensor) else output[0]
        # A copy, because Falcon adds its attention to its MLP's output in place.
        seen.append((read if of == "input" else returned).clone())

    handles = [block.get_submodule(path).register_forward_hook(look, with_kwargs=True) for block in blocks_of(hf_model)]
    try:
        with torch.no_grad():
            hf_model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def foreign_stream(like, seed):
    """A stream that the model never has."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)) * like.std()


# The identities: each holds on every architecture, and each must notice a planted error.


def the_stream_is_what_hooks_see(hf_model, model):
    ids = some_ids(2, 12)
    seen, trunk = hooked(hf_model, ids), model.trunk(model.tokenize(ids))
    with torch.no_grad():
        assert len(seen.inputs) == model.n_layers == LAYERS
        assert torch.equal(trunk.x0, seen.inputs[0])
        x = trunk.x0
        for layer in trunk.order:
            assert torch.equal(x, seen.inputs[layer])
            x = trunk.layer(layer, x)
            assert torch.equal(x, seen.outputs[layer])
            away = foreign_stream(x, layer)
            assert torch.equal(trunk.layer(layer, away), block_on(hf_model, ids, layer, away))
        assert torch.equal(trunk.run(), seen.outputs[-1])


def the_sum_is_the_block(hf_model, model):
    ids = some_ids(2, 12)
    seen, trunk = hooked(hf_model, ids), model.trunk(model.tokenize(ids))
    with torch.no_grad():
        for layer in range(LAYERS):
            for pre in (seen.inputs[layer], foreign_stream(seen.inputs[layer], layer)):
                mid = pre + trunk.write(Site(layer, "attn"), pre)
                post = mid + trunk.write(Site(layer, "mlp"), mid if model.layout == "sequential" else pre)
                assert apart(post, block_on(hf_model, ids, layer, pre)) < CLOSE


def readout_is_what_follows_the_blocks(hf_model, model):
    ids = some_ids(2, 12)
    seen = hooked(hf_model, ids)
    with torch.no_grad():
        assert apart(model.readout(seen.outputs[-1]), seen.logits) < CLOSE
        away = foreign_stream(seen.outputs[-1], 7)
        expected = logits_after(hf_model, ids, away)
        assert apart(model.readout(away), expected) < CLOSE
        assert apart(model.readout(away[1, 3]), expected[1, 3]) < CLOSE
        few = [63, 0, 5, 5]
        assert apart(model.readout(away, few), expected[..., few]) < CLOSE
        assert apart(model.readout(away[:, None, -1:], [9]), expected[:, None, -1:, 9:10]) < CLOSE


def logits_are_the_models(hf_model, model):
    for shape in ((1, 1), (2, 12), (1, 64)):
        ids = some_ids(*shape, seed=3)
        with torch.no_grad():
            expected = hf_model(input_ids=ids).logits
            assert apart(model.logits(ids), expected) < CLOSE
            assert apart(model.own_logits(model.tokenize(ids)), expected) < CLOSE


def gradients_are_autograds(hf_model, model):
    ids = some_ids(2, 6)
    seen = hooked(hf_model, ids)
    weights = torch.randn(seen.logits.shape, generator=torch.Generator().manual_seed(5))
    leaf = seen.inputs[1].clone().requires_grad_()

    def put(_, args, kwargs):
        return ((leaf, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": leaf})

    handle = blocks_of(hf_model)[1].register_forward_pre_hook(put, with_kwargs=True)
    try:
        logits = hf_model(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
    (expected,) = torch.autograd.grad((logits * weights).sum(), leaf)
    with torch.no_grad():
        trunk = model.trunk(model.tokenize(ids))
    x = leaf
    for layer in (1, 2):
        x = trunk.layer(layer, x)
    (found,) = torch.autograd.grad((model.readout(x) * weights).sum(), leaf)
    assert apart(found, expected) < CLOSE
    # The sum of the writes has the same gradient as the block.
    x = trunk.layer(1, leaf)
    mid = x + trunk.write(Site(2, "attn"), x)
    x = mid + trunk.write(Site(2, "mlp"), mid if model.layout == "sequential" else x)
    (found,) = torch.autograd.grad((model.readout(x) * weights).sum(), leaf)
    assert apart(found, expected) < CLOSE


IDENTITIES = {
    the_stream_is_what_hooks_see: [(CausalTrunk, "layer", None)],
    the_sum_is_the_block: [(CausalTrunk, "write", "attn"), (CausalTrunk, "write", "mlp")],
    readout_is_what_follows_the_blocks: [(CausalLM, "readout", None)],
    logits_are_the_models: [(CausalTrunk, "layer", None), (CausalLM, "readout", None)],
    gradients_are_autograds: [(CausalTrunk, "layer", None), (CausalTrunk, "write", None), (CausalLM, "readout", None)],
}
TWINS = [(identity, *planted) for identity, plants in IDENTITIES.items() for planted in plants]


@pytest.mark.parametrize("identity", IDENTITIES, ids=lambda identity: identity.__name__)
def test_identity(identity, hf_model, model):
    identity(hf_model, model)


@few_architectures
@pytest.mark.parametrize(("identity", "owner", "method", "kind"), TWINS)
def test_identity_notices_a_planted_error(identity, owner, method, kind, hf_model, model, monkeypatch):
    plant(monkeypatch, owner, method, kind)
    with pytest.raises(AssertionError):
        identity(hf_model, model)


def test_layout_and_writes(name, model):
    assert model.layout == ("parallel" if name in PARALLEL else "sequential")
    assert model.writes == ("0.attn", "0.mlp", "1.attn", "1.mlp", "2.attn", "2.mlp")
    assert [len(step) for step in model.steps] == ([2] * 3 if name in PARALLEL else [1] * 6)
    assert (model.n_layers, model.d_model, model.n_heads, model.vocab_size) == (3, 32, 4, 64)
    assert model.max_positions == (None if name in ("bloom", "mpt") else 64)


@pytest.mark.parametrize("hf_model", SEQUENTIAL, indirect=False)
def test_resid_mid_is_what_the_second_branch_reads(hf_model):
    name, hf_model = hf_model, SEQUENTIAL[hf_model]()
    model, ids = load(hf_model, name=name), some_ids(2, 12)
    seen, middle = (
        hooked(hf_model, ids),
        seen_at(hf_model, ids, SECOND_READER.get(name, "post_attention_layernorm"), "input"),
    )
    trunk = model.trunk(model.tokenize(ids))
    with torch.no_grad():
        for layer, (pre, mid, post) in enumerate(zip(seen.inputs, middle, seen.outputs, strict=True)):
            mid = mid.reshape(pre.shape)
            attn, mlp = trunk.write(Site(layer, "attn"), pre), trunk.write(Site(layer, "mlp"), mid)
            assert apart(pre + attn, mid) < CLOSE
            assert apart(attn, mid - pre) < 10 * CLOSE
            assert apart(mlp, post - mid) < 10 * CLOSE
            assert apart(attn * 1.001, mid - pre) > 10 * CLOSE, "and the test would notice an error of 0.1 %"


@pytest.mark.parametrize("name", PARALLEL)
def test_parallel_writes_are_what_the_branches_return(name):
    hf_model = PARALLEL[name]()
    model, ids = load(hf_model, name=name), some_ids(2, 12)
    attention = seen_at(hf_model, ids, ATTENTION.get(name, "self_attn"), "output")
    mlps, seen = seen_at(hf_model, ids, "mlp", "output"), hooked(hf_model, ids)
    trunk = model.trunk(model.tokenize(ids))
    with torch.no_grad():
        for layer, (pre, attn, mlp) in enumerate(zip(seen.inputs, attention, mlps, strict=True)):
            assert apart(trunk.write(Site(layer, "attn"), pre), attn) < CLOSE
            assert apart(trunk.write(Site(layer, "mlp"), pre), mlp) < CLOSE
            assert apart(attn, mlp) > 0.1, "and the two are not the same"


@pytest.mark.parametrize("name", ["gemma2", "granite", "gpt2", "opt", "bloom"])
def test_x0_is_more_than_the_token_embedding(name):
    """The first boundary holds embedding scales, learned positions and embedding norms."""
    hf_model, ids = SUPPORTED[name](), some_ids(2, 12)
    model = load(hf_model)
    with torch.no_grad():
        trunk = model.trunk(model.tokenize(ids))
        bare = nn.functional.embedding(ids, hf_model.get_input_embeddings().weight)
    assert torch.equal(trunk.x0, hooked(hf_model, ids).inputs[0])
    assert apart(bare, trunk.x0) > 0.05


# Batches


def padded(side, pad=0):
    """Prompts of unequal length as a tokenizer that pads on a side gives them, and each alone."""
    alone = [some_ids(1, length, seed=length) for length in LENGTHS]
    ids = torch.full((len(LENGTHS), max(LENGTHS)), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(alone):
        width = prompt.shape[1]
        columns = slice(0, width) if side == "right" else slice(ids.shape[1] - width, None)
        ids[row, columns], mask[row, columns] = prompt[0], 1
    return {"input_ids": ids, "attention_mask": mask}, alone


@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_prompts_equal_the_prompts_alone(side, hf_model, model):
    batch, alone = padded(side)
    tokens = model.tokenize(batch)
    with torch.no_grad():
        trunk, logits = model.trunk(tokens), model.logits(batch)
        for row, prompt in enumerate(alone):
            seen, length = hooked(hf_model, prompt), LENGTHS[row]
            assert torch.equal(tokens.ids[row, :length], prompt[0])
            assert apart(trunk.x0[row, :length], seen.inputs[0][0]) < CLOSE
            assert apart(trunk.run()[row, :length], seen.outputs[-1][0]) < CLOSE
            assert apart(logits[row, :length], seen.logits[0]) < CLOSE


def test_padding_that_is_not_masked_is_noticed(hf_model, model):
    """The twin of the test above: without its mask, padding on the left moves every number."""
    batch, alone = padded("left")
    with torch.no_grad():
        logits = model.logits(batch["input_ids"])
    assert apart(logits[1, -LENGTHS[1] :], hooked(hf_model, alone[1]).logits[0]) > CLOSE


def test_what_pads_a_row_changes_nothing(model):
    with torch.no_grad():
        first, second = (model.logits(padded("right", pad)[0]) for pad in (0, 11))
    assert torch.equal(first, second)


def test_a_row_of_a_batch_equals_the_row_alone(model):
    ids = some_ids(4, 10)
    with torch.no_grad():
        assert apart(model.logits(ids)[2:3], model.logits(ids[2:3])) < CLOSE


# The certificate

PLANTS = {
    "attention": ((CausalTrunk, "write", "attn"), "layer"),
    "mlp": ((CausalTrunk, "write", "mlp"), "layer"),
    "block": ((CausalTrunk, "layer", None), "layer"),
    "readout": ((CausalLM, "readout", None), "readout"),
}


def test_verify_holds(model):
    assert model.check.passed
    assert 0 < model.check.error < 1e-6
    assert model.verify() == model.check


@few_architectures
@pytest.mark.parametrize("case", PLANTS)
def test_verify_notices_a_planted_error(case, hf_model, model, monkeypatch):
    planted, where = PLANTS[case]
    plant(monkeypatch, *planted)
    check = model.verify()
    assert not check.passed
    assert where in check.where
    with pytest.raises(UnsupportedModelError, match=f"{where}.*is off by"):
        load(hf_model)


@few_architectures
def test_verify_notices_a_wrong_embedding(model, monkeypatch):
    honest = CausalLM.trunk

    def planted(self, tokens):
        trunk = honest(self, tokens)
        return replace(trunk, x0=trunk.x0 * 1.001)

    monkeypatch.setattr(CausalLM, "trunk", planted)
    check = model.verify()
    assert not check.passed
    assert check.where == "the embedding"


@few_architectures
def test_verify_notices_a_wrong_readout_of_few_tokens(model, monkeypatch):
    honest = CausalLM.readout

    def planted(self, x, vocab=None):
        return honest(self, x, vocab) * (1 if vocab is None else 1.001)

    monkeypatch.setattr(CausalLM, "readout", planted)
    assert model.verify().where == "the readout of few tokens"


@few_architectures
def test_verify_notices_what_is_not_a_number(hf_model, model, monkeypatch):
    honest = CausalTrunk.write
    monkeypatch.setattr(
        CausalTrunk, "write", lambda self, site, x: honest(self, site, x) * (float("nan") if site.layer == 1 else 1)
    )
    check = model.verify()
    assert not check.passed
    assert check.where == "layer 1"


# Precision


def plain_llama(model, ids):
    """Llama written out in float64, from the paper: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""
    config, weights = model.config, {name: tensor.double() for name, tensor in model.state_dict().items()}
    heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    angles = torch.arange(ids.shape[1]).double()[:, None] * model.model.rotary_emb.inv_freq.double()
    cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
    hidden = torch.full((ids.shape[1],) * 2, -torch.inf, dtype=torch.float64).triu(1)

    def norm(x, name):
        return x * (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weights[name]

    def turn(x):
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin

    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."
        h = norm(x, at + "input_layernorm.weight")
        q, k, v = (
            (h @ weights[f"{at}self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, width)).transpose(1, 2)
            for part in "qkv"
        )
        k, v = (part.repeat_interleave(heads // groups, 1) for part in (turn(k), v))
        z = torch.softmax(turn(q) @ k.transpose(2, 3) / width**0.5 + hidden, -1) @ v
        x = x + z.transpose(1, 2).flatten(2) @ weights[at + "self_attn.o_proj.weight"].T
        h = norm(x, at + "post_attention_layernorm.weight")
        gate, up = (h @ weights[f"{at}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ weights[at + "mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ weights["lm_head.weight"].T


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_float64_is_float64_throughout(attention):
    hf_model, ids = SUPPORTED["llama"](attn_implementation=attention), some_ids(2, 12)
    with torch.no_grad():
        truth = plain_llama(hf_model, ids)
        assert apart(load(hf_model).logits(ids).double(), truth) < 1e-5
        assert apart(copy.deepcopy(hf_model).double()(ids).logits, truth) > 1e-9, "casts to float32 on the way"
        wide = load(hf_model).in_float64()
        assert apart(wide.logits(ids), truth) < 1e-13
        assert apart(wide.own_logits(wide.tokenize(ids)), truth) < 1e-13


def test_float64_without_its_arithmetic_is_noticed(monkeypatch):
    """The twin of the test above."""
    hf_model, ids = SUPPORTED["llama"](), some_ids(2, 12)
    monkeypatch.setattr(causal_lm, "stay_float64", nullcontext)
    with torch.no_grad():
        assert apart(load(hf_model).in_float64().logits(ids), plain_llama(hf_model, ids)) > 1e-9


def test_float64_of_every_architecture(hf_model, model):
    ids, before = some_ids(2, 12), state_of(hf_model)
    wide = model.in_float64()
    assert wide.check.passed
    assert (wide.check.tolerance, wide.dtype) == (1e-10, torch.float64)
    assert wide.hf_model is not hf_model
    trunk = wide.trunk(wide.tokenize(ids))
    assert trunk.x0.dtype == trunk.layer(0, trunk.x0).dtype == wide.logits(ids).dtype == torch.float64
    assert not {p.data_ptr() for p in wide.hf_model.parameters()} & {p.data_ptr() for p in hf_model.parameters()}
    with torch.no_grad():
        assert apart(wide.logits(ids), hooked(hf_model, ids).logits.double()) < CLOSE
    assert state_of(hf_model) == before


@pytest.mark.parametrize(("case", "dtype"), [*((case, torch.bfloat16) for case in SUPPORTED), ("llama", torch.float16)])
def test_half_precision(case, dtype):
    hf_model, ids = SUPPORTED[case]().to(dtype), some_ids(2, 12)
    model = load(hf_model)
    with torch.no_grad():
        assert (model.dtype, model.logits(ids).dtype) == (dtype, dtype)
        assert torch.equal(model.trunk(model.tokenize(ids)).run(), hooked(hf_model, ids).outputs[-1])


# After every call, also one that raises, everything is as it was


def calls_of(model):
    """Every way into a model."""
    ids = some_ids(2, 5)
    tokens, x = model.tokenize(ids), torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        trunk = model.trunk(tokens)
    return {
        "trunk": lambda: model.trunk(tokens),
        "layer": lambda: trunk.layer(1, x),
        "attn": lambda: trunk.write(Site(1, "attn"), x),
        "mlp": lambda: trunk.write(Site(1, "mlp"), x),
        "run": lambda: trunk.run(),
        "readout": lambda: model.readout(x),
        "few": lambda: model.readout(x, [3, 1]),
        "own_logits": lambda: model.own_logits(tokens),
        "logits": lambda: model.logits(ids),
        "verify": lambda: model.verify(),
        "in_float64": lambda: model.in_float64(),
        "generate": lambda: model.generate("w1 w2", max_new_tokens=2),
    }


def test_everything_is_as_it_was(name):
    hf_model = SUPPORTED[name]()
    blocks_of(hf_model)[1].register_forward_hook(lambda *_: None)
    blocks_of(hf_model)[1].register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    before = state_of(hf_model)
    model = load(hf_model, tokenizer=tokenizer())
    assert state_of(hf_model) == before
    for call in calls_of(model).values():
        call()
        assert state_of(hf_model) == before


def test_a_changed_state_is_noticed():
    """The twin of the test above: each part of the state, changed."""
    for change in (
        lambda m: m.lm_head.weight.data.mul_(1.001),
        lambda m: m.train(),
        lambda m: setattr(m.model, "norm", copy.deepcopy(m.model.norm)),
        lambda m: setattr(m.model.norm, "forward", m.model.norm.forward),
        lambda m: m.model.norm.register_forward_hook(lambda *_: None),
        lambda m: m.model.norm.__dict__.update(_forward_hooks={}),
        lambda m: setattr(m.config, "rms_norm_eps", 1.0),
        lambda m: m.set_attn_implementation("eager"),
        lambda m: m.set_experts_implementation("batched_mm"),
        lambda m: torch.rand(1),
    ):
        hf_model = SUPPORTED["mixtral"]()
        before = state_of(hf_model)
        change(hf_model)
        assert state_of(hf_model) != before


class Planted(Exception):
    """Raised midway through a forward pass."""


@pytest.mark.parametrize("place", ["blocks.1", "blocks.1.attn", "blocks.1.mlp", "norm", "head", "forward"])
@pytest.mark.parametrize("case", ["gpt2", "gptj"])
def test_everything_is_as_it_was_after_an_error(case, place, monkeypatch):
    hf_model = SUPPORTED[case]().train()
    model = load(hf_model, tokenizer=tokenizer())
    block = hf_model.transformer.h[1]
    modules = {
        "blocks.1": block,
        "blocks.1.attn": block.attn,
        "blocks.1.mlp": block.mlp,
        "norm": hf_model.transformer.ln_f,
        "head": hf_model.lm_head,
        "forward": hf_model,
    }
    raised, calls = [], calls_of(model)

    def fail(*_):
        raise Planted

    modules[place].register_forward_pre_hook(fail)
    before = state_of(hf_model)
    for call_name, call in calls.items():
        try:
            call()
        except (Planted, UnsupportedModelError):
            raised.append(call_name)
        assert state_of(hf_model) == before, call_name
    assert {"own_logits", "verify", "in_float64"} <= set(raised)
    with pytest.raises(UnsupportedModelError, match="Planted"):
        load(hf_model)
    assert state_of(hf_model) == before


def test_dropout_is_off_and_the_training_flags_stay():
    hf_model, ids = SUPPORTED["gpt2"](resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5), some_ids(2, 12)
    expected = hooked(hf_model, ids).logits
    hf_model.train()
    blocks_of(hf_model)[1].mlp.eval()
    assert apart(hooked(hf_model, ids).logits, expected) > 0.01, "dropout acts on a plain call"
    before = state_of(hf_model)
    model = load(hf_model)
    with torch.no_grad():
        assert apart(model.logits(ids), expected) < CLOSE
        assert torch.equal(model.logits(ids), model.logits(ids))
        assert apart(model.own_logits(model.tokenize(ids)), expected) < CLOSE
    assert state_of(hf_model) == before


def test_gradients_go_to_the_callers_leaves_alone():
    hf_model = SUPPORTED["llama"]()
    model = load(hf_model)
    with torch.no_grad():
        assert not model.logits(some_ids(1, 4)).requires_grad
    trunk = model.trunk(model.tokenize(some_ids(1, 4)))
    leaf = trunk.x0.detach().requires_grad_()
    torch.autograd.grad(model.readout(replace(trunk, x0=leaf).run()).sum(), leaf)
    assert all(parameter.grad is None for parameter in hf_model.parameters())


def test_a_recording_holds_no_stream():
    """A trunk keeps masks and positions, never the stream it was recorded with."""
    model = load(SUPPORTED["llama"]())
    trunk = model.trunk(model.tokenize(some_ids(2, 12)))
    kept = [value for call in trunk.calls for value in (*call.args, *call.kwargs.values())]
    assert not [value for value in kept if isinstance(value, torch.Tensor) and value.shape == trunk.x0.shape]
    x = trunk.x0.clone()
    trunk.run()
    assert torch.equal(trunk.x0, x)


@pytest.mark.parametrize("loads", [1, 2])
def test_threads_do_not_disturb_each_other(loads):
    """Also not through two loads of the same model, whose blocks are the same."""
    hf_model = SUPPORTED["gpt2"]()
    batches = [some_ids(2, 5 + number, seed=number) for number in range(4)]
    expected = [hooked(hf_model, ids).logits for ids in batches]
    models = [load(hf_model) for _ in range(loads)]
    before, interval = state_of(hf_model), sys.getswitchinterval()

    def work(number):
        model, ids = models[number % loads], batches[number % 4]
        with torch.no_grad():
            trunk = model.trunk(model.tokenize(ids))
            mid = trunk.x0 + trunk.write(Site(0, "attn"), trunk.x0)
            total = mid + trunk.write(Site(0, "mlp"), mid)
            return apart(model.logits(ids), expected[number % 4]), apart(total, trunk.layer(0, trunk.x0))

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            errors = list(pool.map(work, range(24)))
    finally:
        sys.setswitchinterval(interval)
    assert max(max(pair) for pair in errors) < CLOSE
    assert state_of(hf_model) == before


# Text


def test_generate_is_greedy():
    hf_model = SUPPORTED["llama"]()
    model, ids = load(hf_model, tokenizer=tokenizer()), torch.tensor([[3, 7, 11]])
    for _ in range(6):
        with torch.no_grad():
            ids = torch.cat([ids, hf_model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    expected = " ".join(f"w{token}" if token < 63 else "<unk>" for token in ids[0].tolist())
    assert model.generate("w3 w7 w11", max_new_tokens=6) == expected
    assert model.generate("w3 w7 w11", max_new_tokens=0) == "w3 w7 w11"


def test_generate_stops_at_the_end_of_text():
    model = load(SUPPORTED["llama"](), tokenizer=tokenizer())
    words = model.generate("w3 w7 w11", max_new_tokens=6).split()
    model.tokenizer.eos_token = words[4]
    assert model.generate("w3 w7 w11", max_new_tokens=6).split() == words[: words.index(words[4])]


def test_repr_says_what_the_model_is_and_whether_it_was_proved():
    text = repr(load(SUPPORTED["gptj"](), name="toy"))
    assert text.startswith("CausalLM(toy: 3 layers, d_model 32, 4 heads, parallel; pre + attn + mlp = post")
    assert text.endswith("(ok))")
