"""Values inside the branches against plain hooks on the untouched model, sliced by hand for each architecture."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from models.test_load import bridge_of
from tiny import LAYERS, SUPPORTED, apart, blocks_of, hooked, some_ids, state_of, tokenizer

from resstream.errors import EditError, SiteError, UnsupportedModelError
from resstream.models import inside, load
from resstream.models.causal_lm import CausalTrunk
from resstream.models.trunk import TOLERANCE
from resstream.sites import Site

CLOSE = TOLERANCE[torch.float32]
HEADS = 4
BRIDGED = ["gpt2", "gptneo", "opt", "bloom", "mpt", "neox_sequential", "llama", "qwen3", "gemma2", "gptj", "phi"]

# Where an architecture keeps what attention and MLP end with, inside a block.
OUT = {
    "gpt2": "attn.c_proj",
    "gptneo": "attn.attention.out_proj",
    "opt": "self_attn.out_proj",
    "xglm": "self_attn.out_proj",
    "bloom": "self_attention.dense",
    "mpt": "attn.out_proj",
    "gptj": "attn.out_proj",
    "phi": "self_attn.dense",
    **dict.fromkeys(("neox_sequential", "neox_parallel"), "attention.dense"),
    **dict.fromkeys(("falcon_old", "falcon_new"), "self_attention.dense"),
}
DOWN = {
    "gpt2": "mlp.c_proj",
    "gptneo": "mlp.c_proj",
    "opt": "fc2",
    "xglm": "fc2",
    "mpt": "ffn.down_proj",
    "gptj": "mlp.fc_out",
    "phi": "mlp.fc2",
    **dict.fromkeys(("bloom", "neox_sequential", "neox_parallel", "falcon_old", "falcon_new"), "mlp.dense_4h_to_h"),
}
JOINT = {
    "gpt2": "attn.c_attn",
    "bloom": "self_attention.query_key_value",
    "mpt": "attn.Wqkv",
    **dict.fromkeys(("neox_sequential", "neox_parallel"), "attention.query_key_value"),
    **dict.fromkeys(("falcon_old", "falcon_new"), "self_attention.query_key_value"),
}
WIDE = ("gpt2", "gptneo", "bloom", "mpt", "gptj", "falcon_old", "falcon_new")  # MLPs of four times d_model
SEPARATE = {"gptneo": "attn.attention.{}_proj", "gptj": "attn.{}_proj"}


def columns_of(name, kind):
    """The columns of a joint projection that hold one kind, head by head, as each architecture's own code has them."""
    at = torch.arange({"falcon_old": 48, "falcon_new": 64}.get(name, 96))
    third = "qkv".index(kind)
    if name in ("gpt2", "mpt"):  # all queries, all keys, all values
        return at.chunk(3)[third].view(HEADS, -1)
    if name in ("bloom", "neox_sequential", "neox_parallel"):  # head by head: its query, key, value
        return at.view(HEADS, 3, -1)[:, third]
    if name == "falcon_old":  # all queries, then the one key and the one value that all share
        return at.split([32, 8, 8])[third].view(-1, 8)
    grouped = at.view(2, 4, 8)  # group by group: two queries, a key, a value
    return (grouped[:, :2].flatten(0, 1), grouped[:, 2], grouped[:, 3])[third]


def place_of(name, kind):
    """Which module of a block has a kind, whether in its input, and in which columns, head by head."""
    if kind == "z":
        return OUT.get(name, "self_attn.o_proj"), True, torch.arange(32).view(HEADS, -1)
    if kind == "neuron":
        return DOWN.get(name, "mlp.down_proj"), True, torch.arange(128 if name in WIDE else 48)
    if name in JOINT:
        return JOINT[name], False, columns_of(name, kind)
    heads = 2 if kind != "q" and "num_key_value_heads" in SUPPORTED[name].args[1] else HEADS
    return SEPARATE.get(name, "self_attn.{}_proj").format(kind), False, torch.arange(8 * heads).view(heads, 8)


def passing(hf_model, ids, path, **kwargs):
    """What a submodule of each block reads and returns in one plain forward pass."""
    seen = []

    def look(_, args, keywords, output):
        read = args[0] if args else next(iter(keywords.values()))
        seen.append((read.clone(), output.clone()))

    handles = [block.get_submodule(path).register_forward_hook(look, with_kwargs=True) for block in blocks_of(hf_model)]
    try:
        with torch.no_grad():
            hf_model(input_ids=ids, use_cache=False, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def by_hand(name, hf_model, ids, kind):
    """A kind in every layer, sliced by hand from what plain hooks see."""
    path, in_input, columns = place_of(name, kind)
    seen = [(read if in_input else returned) for read, returned in passing(hf_model, ids, path)]
    return [value.reshape(*ids.shape, -1)[..., columns] for value in seen]


def patched(name, hf_model, ids, kind, layer, change):
    """The logits of a plain forward pass in which a hook changes a kind in one layer."""
    path, in_input, columns = place_of(name, kind)

    def changed(raw):
        flat = raw.reshape(*ids.shape, -1).clone()
        flat[..., columns] = change(flat[..., columns])
        return flat.reshape(raw.shape)

    module = blocks_of(hf_model)[layer].get_submodule(path)
    if in_input:
        handle = module.register_forward_pre_hook(lambda _, args: (changed(args[0]), *args[1:]))
    else:
        handle = module.register_forward_hook(lambda _, args, output: changed(output))
    try:
        return hf_model(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()


def values(model, ids, *kinds):
    """Kinds in every layer, as the opened trunk shows them, and the stream that it ends with."""
    trunk, found = model.trunk(model.tokenize(ids)), []
    with torch.no_grad():
        x = trunk.x0
        for layer in trunk.order:
            seen = {}
            x = trunk.layer(layer, x, {kind: partial(seen.setdefault, kind) for kind in kinds})
            found.append(seen)
    return found, x


def logits_with(model, ids, kind, layer, change):
    """The logits of the opened trunk with a kind changed in one layer."""
    trunk = model.trunk(model.tokenize(ids))
    x = trunk.x0
    for each in trunk.order:
        x = trunk.layer(each, x, {kind: change}) if each == layer else trunk.layer(each, x)
    return model.readout(x)


def noisy(value, seed=3):
    """A value with one part changed at one position: heads lie on axis 2, and neurons too."""
    rng = torch.Generator().manual_seed(seed)
    value = value.clone()
    value[:, 2, -1] += torch.randn(value[:, 2, -1].shape, generator=rng) * value.std()
    return value


@pytest.fixture(scope="module", params=SUPPORTED)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def hf_model(name):
    return SUPPORTED[name]()


@pytest.fixture(scope="module")
def model(name, hf_model):
    return load(hf_model, name=name, tokenizer=tokenizer())


few_architectures = pytest.mark.parametrize("name", ["gpt2", "llama", "olmo2", "falcon_new"], indirect=True)


# What is there


def test_the_parts(name, model):
    shared = {"falcon_old": 1}.get(
        name, 2 if "num_key_value_heads" in SUPPORTED[name].args[1] or name == "falcon_new" else 4
    )
    neurons = {"neuron": 128 if name in WIDE else 48}
    heads = dict.fromkeys(("head", "z", "q", "pattern"), HEADS)
    assert dict(model.parts) == {**heads, "k": shared, "v": shared, **({} if name == "mixtral" else neurons)}
    assert model.n_kv_heads == shared


@pytest.mark.parametrize("kind", ["z", "q", "k", "v", "neuron"])
def test_a_value_is_what_a_plain_hook_sees(kind, name, hf_model, model):
    if kind not in model.parts:
        assert (name, kind) == ("mixtral", "neuron")
        return
    ids = some_ids(2, 12)
    found, final = values(model, ids, kind)
    for seen, expected in zip(found, by_hand(name, hf_model, ids, kind), strict=True):
        assert torch.equal(seen[kind], expected)
    assert torch.equal(final, hooked(hf_model, ids).outputs[-1]), "and reading it changes nothing"


@pytest.mark.parametrize("kind", ["z", "q", "k", "v", "neuron"])
def test_a_changed_value_acts_as_in_a_plain_hook(kind, name, hf_model, model):
    if kind not in model.parts:
        assert (name, kind) == ("mixtral", "neuron")
        return
    ids = some_ids(2, 12)
    with torch.no_grad():
        for layer in range(LAYERS):
            expected = patched(name, hf_model, ids, kind, layer, noisy)
            assert apart(logits_with(model, ids, kind, layer, noisy), expected) < CLOSE
            assert apart(hooked(hf_model, ids).logits, expected) > CLOSE, "and the change is one that shows"


def test_the_pattern_is_the_one_that_an_eager_copy_returns(name, hf_model, model):
    ids = some_ids(2, 12)
    eager = SUPPORTED[name](attn_implementation="eager")
    eager.load_state_dict(hf_model.state_dict())
    with torch.no_grad():
        expected = eager(input_ids=ids, output_attentions=True, use_cache=False).attentions
    found, final = values(model, ids, "pattern")
    assert len(expected) == LAYERS
    for seen, pattern in zip(found, expected, strict=True):
        assert apart(seen["pattern"], pattern.reshape(2, HEADS, 12, 12)) < CLOSE
    assert torch.equal(final, hooked(hf_model, ids).outputs[-1])


def test_a_changed_pattern_mixes_the_values(name, hf_model, model):
    """What a pattern does is known: its product with the values is z, which a plain hook puts there."""
    ids, layer = some_ids(2, 12), 1

    def even(pattern):
        return torch.ones_like(pattern).tril() / torch.arange(1, 13)[:, None]

    v = by_hand(name, hf_model, ids, "v")[layer]
    mixed = torch.einsum(
        "bhqk,bkhd->bqhd", even(torch.zeros(2, HEADS, 12, 12)), v.repeat_interleave(HEADS // v.shape[2], 2)
    )
    with torch.no_grad():
        expected = patched(name, hf_model, ids, "z", layer, lambda _: mixed)
        assert apart(logits_with(model, ids, "pattern", layer, even), expected) < CLOSE


def test_padded_prompts_equal_the_prompts_alone(model):
    alone = [some_ids(1, length, seed=length) for length in (12, 5, 9)]
    ids, mask = torch.zeros(3, 12, dtype=torch.long), torch.zeros(3, 12, dtype=torch.long)
    for row, prompt in enumerate(alone):
        ids[row, : prompt.shape[1]], mask[row, : prompt.shape[1]] = prompt[0], 1
    batch, _ = values(model, {"input_ids": ids, "attention_mask": mask}, "pattern", "z")
    for row, prompt in enumerate(alone):
        length = prompt.shape[1]
        for padded, own in zip(batch, values(model, prompt, "pattern", "z")[0], strict=True):
            assert apart(padded["pattern"][row, :, :length, :length], own["pattern"][0]) < CLOSE
            assert not padded["pattern"][row, :, :length, length:].any()
            assert apart(padded["z"][row, :length], own["z"][0]) < CLOSE


# Heads


def written_by_hand(name, hf_model, ids, layer):
    """Each head's write, from its z and the weights; scales of norms after attention by their definition."""
    block = blocks_of(hf_model)[layer]
    projection = block.get_submodule(OUT.get(name, "self_attn.o_proj"))
    weight = projection.weight if name == "gpt2" else projection.weight.T
    read, returned = passing(hf_model, ids, OUT.get(name, "self_attn.o_proj"))[layer]
    parts = torch.stack(
        [z @ rows for z, rows in zip(read.chunk(HEADS, -1), weight.chunk(HEADS, 0), strict=True)], dim=2
    ).detach()
    if name in ("gemma2", "gemma3", "olmo2"):
        gain = block.post_attention_layernorm.weight.detach() + (0 if name == "olmo2" else 1)
        eps = hf_model.config.rms_norm_eps
        parts = parts * gain / (returned.pow(2).mean(-1, keepdim=True) + eps).sqrt()[:, :, None]
    return parts * (0.3 if name == "granite" else 1)


def heads_are_what_they_write(name, hf_model, model):
    ids = some_ids(2, 12)
    trunk, stream = model.trunk(model.tokenize(ids)), hooked(hf_model, ids).inputs
    with torch.no_grad():
        for layer, seen in enumerate(values(model, ids, "z")[0]):
            heads = trunk.head_writes(layer, seen["z"])
            assert apart(heads, written_by_hand(name, hf_model, ids, layer)) < CLOSE
            write = trunk.write(Site(layer, "attn"), stream[layer])
            rest = write - heads.sum(2)
            bias = getattr(blocks_of(hf_model)[layer].get_submodule(OUT.get(name, "self_attn.o_proj")), "bias", None)
            assert apart(heads.sum(2) + (0 if bias is None else bias), write) < CLOSE
            assert bias is not None or apart(heads.sum(2), write) < CLOSE, rest


def test_heads_are_what_they_write(name, hf_model, model):
    heads_are_what_they_write(name, hf_model, model)


@few_architectures
def test_heads_that_write_something_else_are_noticed(name, hf_model, model, monkeypatch):
    """The twin: heads in another order, and heads that are off by 0.1 %."""
    honest = CausalTrunk.head_writes
    for plant in (lambda heads: heads.roll(1, 2), lambda heads: heads + 0.001 * heads.roll(1, -1)):
        monkeypatch.setattr(
            CausalTrunk, "head_writes", lambda self, layer, z, plant=plant: plant(honest(self, layer, z))
        )
        with pytest.raises(AssertionError):
            heads_are_what_they_write(name, hf_model, model)
        assert not load(hf_model).checks_inside["head"].passed


def test_head_writes_leave_no_keys_and_values_behind(model):
    """A base run that keeps its keys and values keeps those of the stream that it had."""
    tokens = model.tokenize(some_ids(1, 6))
    with torch.no_grad():
        plain, read = model.trunk(tokens, keep=True), model.trunk(tokens, keep=True)
        x, z = plain.run(), values(model, tokens.ids, "z")[0]
        assert torch.equal(read.run(), x)
        for layer in range(LAYERS):
            read.head_writes(layer, z[layer]["z"])
    for layer in range(LAYERS):
        assert torch.equal(plain.left.keys[layer], read.left.keys[layer])
        assert torch.equal(plain.left.values[layer], read.left.values[layer])


def test_a_suffix_shows_what_stands_on_it(model):
    """With the left side kept from a base run, values are those of the last positions, and patterns see every key."""
    ids, kinds = some_ids(2, 12), [kind for kind in model.parts if kind != "head"]
    tokens, (whole, _) = model.tokenize(ids), values(model, ids, *kinds)
    assert model.reuses_left
    with torch.no_grad():
        base = model.trunk(tokens, keep=True)
        base.run()
        trunk = model.trunk(tokens, left=base.left.take([0, 1], until=8))
        x = trunk.x0
        for layer in trunk.order:
            seen = {}
            after = trunk.layer(layer, x, {kind: partial(seen.setdefault, kind) for kind in kinds})
            assert apart(seen.pop("pattern"), whole[layer]["pattern"][:, :, 8:]) < CLOSE
            for kind, value in seen.items():
                assert apart(value, whole[layer][kind][:, 8:]) < CLOSE
            heads = trunk.head_writes(layer, seen["z"])
            assert apart(heads, base.head_writes(layer, whole[layer]["z"])[:, 8:]) < CLOSE
            x = after


# Gradients


@pytest.mark.parametrize("kind", ["z", "q", "k", "v", "neuron"])
def test_gradients_flow_through_what_is_put_there(kind, name, hf_model, model):
    if kind not in model.parts:
        assert (name, kind) == ("mixtral", "neuron")
        return
    ids = some_ids(1, 6)
    weights = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(5))

    def slope(run):
        leaf = by_hand(name, hf_model, ids, kind)[1].detach().requires_grad_()
        return torch.autograd.grad((run(lambda _: leaf) * weights).sum(), leaf)[0]

    expected = slope(lambda change: patched(name, hf_model, ids, kind, 1, change))
    assert apart(slope(lambda change: logits_with(model, ids, kind, 1, change)), expected) < CLOSE


def test_gradients_flow_through_heads_and_patterns(name, model):
    ids = some_ids(1, 6)
    trunk = model.trunk(model.tokenize(ids))
    found, _ = values(model, ids, "z", "pattern")
    z = found[1]["z"].requires_grad_()
    (slope,) = torch.autograd.grad(trunk.head_writes(1, z)[:, :, 2].square().sum(), z)
    assert slope[:, :, 2].any()
    assert not slope[:, :, [0, 1, 3]].any()
    pattern = found[1]["pattern"].requires_grad_()
    (slope,) = torch.autograd.grad(logits_with(model, ids, "pattern", 1, lambda _: pattern).square().sum(), pattern)
    step = 1e-3 * torch.randn(pattern.shape, generator=torch.Generator().manual_seed(1)).tril()
    wide = model.in_float64()

    def score(by):
        with torch.no_grad():
            return logits_with(wide, ids, "pattern", 1, lambda _: (pattern + by).double()).square().sum()

    assert float((slope * step).sum()) == pytest.approx(float(score(step) - score(-step)) / 2, rel=1e-3)


# The proofs


def test_the_proofs_hold(model):
    assert set(model.checks_inside) == set(model.parts)
    assert model.check_inside.passed
    assert model.check_inside.error < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_proofs_hold_in_other_precisions(dtype, name, model):
    other = model.in_float64() if dtype == torch.float64 else load(SUPPORTED[name]().to(dtype))
    assert other.parts == model.parts
    assert other.check_inside.passed
    assert other.check_inside.tolerance == TOLERANCE[dtype]


def with_places(model, **changes):
    """The model, with other places for some kinds."""
    planted = copy.copy(model)
    places = [
        {kind: changes[kind](place, layer_places) if kind in changes else place for kind, place in layer_places.items()}
        for layer_places in model.insides.places
    ]
    planted.__dict__["insides"] = replace(model.insides, places=places)
    planted.__dict__.pop("checks_inside", None)
    return planted


def columns(place):
    return torch.arange(32 if place.shape[0] == 4 else place.shape[0] * 8) if place.columns is None else place.columns


def rolled(place, _):
    """Each head taken for the next."""
    return replace(place, columns=columns(place).view(place.shape).roll(1, 0).flatten())


def shuffled(place, _):
    """The columns of a head in another order."""
    return replace(place, columns=columns(place).view(place.shape).flip(1).flatten())


def strayed(place, _):
    """One column of the first head taken for one of the next."""
    at = columns(place).clone()
    at[[0, 8]] = at[[8, 0]]
    return replace(place, columns=at)


def taken_for(kind):
    return lambda place, places: places[kind]


PLANTS = {
    "queries in another order": ("q", {"q": rolled}),
    "keys in another order": ("k", {"k": rolled}),
    "values in another order": ("v", {"v": rolled}),
    "values in another order, by the pattern": ("pattern", {"v": rolled}),
    "z in another order, by the queries": ("q", {"z": rolled}),
    "z in another order, by the pattern": ("pattern", {"z": rolled}),
    "z in another order, by the heads": ("head", {"z": rolled}),
    "the columns of a value in another order": ("pattern", {"v": shuffled}),
    "the columns of a z in another order": ("head", {"z": shuffled}),
    "a stray column of a query": ("q", {"q": strayed}),
    "a stray column of a key": ("k", {"k": strayed}),
    "a stray column of a value": ("v", {"v": strayed}),
    "keys for queries": ("q", {"q": taken_for("k")}),
    "values for keys": ("pattern", {"v": taken_for("k")}),
    "queries for keys": ("k", {"k": taken_for("q")}),
}


@pytest.mark.parametrize("case", PLANTS)
@pytest.mark.parametrize("name", ["gpt2", "neox_parallel", "llama", "olmo2", "falcon_new"], indirect=True)
def test_the_proofs_notice_wrong_columns(case, name, model):
    kind, changes = PLANTS[case]
    if "for" in case and model.parts["q"] != model.parts["k"]:
        return  # they cannot be taken for each other where there are fewer of them
    planted = with_places(model, **changes)
    assert not planted.checks_inside[kind].passed
    with pytest.raises(
        UnsupportedModelError, match=f'where "{kind}" is inside the branches of {name} could not be proved'
    ):
        planted.require_inside(kind)
    assert not planted.check_inside.passed


class Scaled(inside.Place):
    """A place whose value is shown 0.1 % too large."""

    def get(self, raw, lead):
        return super().get(raw, lead) * 1.001


@few_architectures
@pytest.mark.parametrize("kind", ["neuron", "v"])
def test_the_proofs_notice_a_value_that_is_not_the_one(kind, model):
    planted = with_places(model, **{kind: lambda place, _: Scaled(**vars(place))})
    assert not planted.checks_inside["pattern" if kind == "v" else kind].passed


@few_architectures
@pytest.mark.parametrize("plant", [lambda p: p.roll(1, 1), lambda p: p * 1.001, lambda p: p.transpose(-1, -2)])
def test_the_proofs_notice_a_pattern_that_is_not_the_one(plant, model, monkeypatch):
    honest = inside.patterns

    def shown(attention, function):
        return honest(attention, lambda pattern: (function(plant(pattern)), pattern)[1])

    monkeypatch.setattr(inside, "patterns", shown)
    assert not with_places(model).checks_inside["pattern"].passed


# Bridges


@pytest.mark.parametrize("name", BRIDGED)
def test_a_bridge_shows_what_the_model_inside_it_computes(name):
    ids, expected = some_ids(2, 9), load(SUPPORTED[name](), name=name)
    bridge = bridge_of(SUPPORTED[name]())
    before = state_of(bridge.original_model)
    model = load(bridge, name=name)
    assert dict(model.parts) == dict(expected.parts)
    assert model.check_inside.passed
    found, _ = values(model, ids, "z", "q", "k", "v", "pattern", "neuron")
    for kind in ("z", "q", "k", "v", "neuron"):
        for seen, value in zip(found, by_hand(name, expected.hf_model, ids, kind), strict=True):
            assert apart(seen[kind], value) < CLOSE
    patterns, _ = values(expected, ids, "pattern")
    trunk = model.trunk(model.tokenize(ids))
    for layer, seen in enumerate(found):
        assert apart(seen["pattern"], patterns[layer]["pattern"]) < CLOSE
        with torch.no_grad():
            heads = trunk.head_writes(layer, seen["z"])
        assert apart(heads, written_by_hand(name, expected.hf_model, ids, layer)) < CLOSE
    assert state_of(bridge.original_model) == before


@pytest.mark.parametrize("name", ["gpt2", "llama", "neox_parallel"])
def test_a_bridge_in_compatibility_mode_shows_what_its_folded_weights_compute(name):
    bridge = bridge_of(SUPPORTED[name](), compatible=True)
    model, ids = load(bridge, name=name), some_ids(2, 9)
    assert model.check_inside.passed
    found, _ = values(model, ids, "z", "v", "pattern")
    with torch.no_grad():
        _, cache = bridge.run_with_cache(ids)
    for layer, seen in enumerate(found):
        for kind in ("z", "v", "pattern"):
            assert apart(seen[kind], cache[f"blocks.{layer}.attn.hook_{kind}"].reshape(seen[kind].shape)) < CLOSE


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_users_hooks_on_a_bridge_still_fire(name):
    bridge, ids, fired = bridge_of(SUPPORTED[name]()), some_ids(1, 5), []
    model = load(bridge)
    assert model.parts["z"] == HEADS

    def halve(value, hook):
        fired.append(hook.name)
        return value * 0.5

    plain, _ = values(model, ids, "z", "pattern")
    bridge.add_hook("blocks.1.attn.hook_pattern", halve)
    halved, _ = values(model, ids, "z", "pattern")
    assert fired == ["blocks.1.attn.hook_pattern"]
    assert apart(halved[1]["z"], 0.5 * plain[1]["z"]) < CLOSE
    assert torch.equal(halved[1]["pattern"], plain[1]["pattern"]), "the pattern is the softmax's, before the hook"


def test_the_proofs_of_a_bridge_notice_a_hook_that_changes_the_pattern():
    bridge = bridge_of(SUPPORTED["llama"]())
    model = load(bridge)
    bridge.add_hook("blocks.1.attn.hook_pattern", lambda value, hook: value * 0.5)
    with pytest.raises(UnsupportedModelError, match="'pattern times v = z' is off by"):
        model.require_inside("pattern")


# After every call, also one that raises, everything is as it was


class Planted(Exception):
    """Raised midway through a forward pass."""


def test_everything_is_as_it_was(name):
    hf_model = SUPPORTED[name]()
    blocks_of(hf_model)[1].get_submodule(OUT.get(name, "self_attn.o_proj")).register_forward_hook(lambda *_: None)
    before, ids = state_of(hf_model), some_ids(2, 5)
    model = load(hf_model)

    def fail(_):
        raise Planted

    assert model.parts
    assert state_of(hf_model) == before
    assert model.check_inside.passed
    assert state_of(hf_model) == before
    kinds = [kind for kind in model.parts if kind != "head"]
    found, _ = values(model, ids, *kinds)
    assert state_of(hf_model) == before
    trunk = model.trunk(model.tokenize(ids))
    trunk.head_writes(1, found[1]["z"])
    assert state_of(hf_model) == before
    for kind in kinds:
        branch = Site(1, kind).branch
        for run in (lambda k: trunk.layer(1, trunk.x0, k), lambda k, b=branch: trunk.write(Site(1, b), trunk.x0, k)):
            run({kind: lambda value: value * 2})
            assert state_of(hf_model) == before
            with pytest.raises(Planted):
                run({kind: fail})
            assert state_of(hf_model) == before


# What cannot be told apart


def test_a_mixture_of_experts_has_no_neurons():
    model = load(SUPPORTED["mixtral"](), name="moe")
    with pytest.raises(UnsupportedModelError) as caught:
        model.site("1.neuron.0")
    assert str(caught.value) == (
        'nothing of the kind "neuron" can be read or edited in moe: its MLPs have no single down-projection, as with a '
        'mixture of experts, or not all have the same width; use a whole write, such as "0.mlp"'
    )
    with pytest.raises(UnsupportedModelError, match='"neuron" can be read or edited in moe'):
        values(model, some_ids(1, 3), "neuron")


def test_attention_that_never_shows_its_pattern_has_none(monkeypatch):
    """An attention of its own, which is neither a softmax of torch nor its fused form."""
    from transformers import AttentionInterface

    def attention(module, query, key, value, attention_mask, scaling, **_):
        key, value = (each.repeat_interleave(module.num_key_value_groups, 1) for each in (key, value))
        scores = (query @ key.transpose(-1, -2) * scaling).exp().tril()
        return (scores / scores.sum(-1, keepdim=True) @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("by_exp", attention)
    model = load(SUPPORTED["llama"](attn_implementation="by_exp"), name="own")
    assert "pattern" not in model.parts
    assert model.check_inside.passed
    with pytest.raises(
        UnsupportedModelError, match=r'"pattern" .* in own: .* load the model with attn_implementation="sdpa"'
    ):
        model.site("0.pattern")


def test_a_context_too_short_to_try_anything_out():
    model = load(SUPPORTED["llama"](max_position_embeddings=2), name="short")
    assert dict(model.parts) == {}
    with pytest.raises(UnsupportedModelError, match=r'"z" .* in short: its context of 2 tokens is too short'):
        model.site("0.z")


def test_a_heads_write_is_not_a_value_on_the_way():
    model = load(SUPPORTED["llama"](), name="toy")
    trunk = model.trunk(model.tokenize(some_ids(1, 3)))
    with pytest.raises(SiteError, match=r'"1\.head" is what heads add to the stream, .* pass a function for "z"'):
        trunk.layer(1, trunk.x0, {"head": lambda value: value})


def test_a_value_in_the_other_branch_is_refused():
    model = load(SUPPORTED["llama"](), name="toy")
    trunk = model.trunk(model.tokenize(some_ids(1, 3)))
    with pytest.raises(UnsupportedModelError, match=r'"1\.z" passed 0 times in one run of layer 1 of toy'):
        trunk.write(Site(1, "mlp"), trunk.x0, {"z": lambda value: value})


def test_a_new_value_of_another_shape_is_refused():
    """Also one that has as many numbers, in another order."""
    model = load(SUPPORTED["llama"](), name="toy")
    trunk = model.trunk(model.tokenize(some_ids(1, 3)))
    with pytest.raises(EditError, match=r'"1.z" is a tensor of shape \[1, 4, 3, 8\]; give .* of shape \[1, 3, 4, 8\]'):
        trunk.layer(1, trunk.x0, {"z": lambda value: value.transpose(1, 2)})
    with pytest.raises(EditError, match=r'"1\.pattern" is NoneType; give a tensor'):
        trunk.layer(1, trunk.x0, {"pattern": lambda value: None})


# SmolLM2


def test_smollm2_has_nine_query_heads_and_three_that_they_share(smollm2):
    assert dict(smollm2.parts) == {**dict.fromkeys(("head", "z", "q", "pattern"), 9), "k": 3, "v": 3, "neuron": 1536}
    assert smollm2.n_kv_heads == 3
    assert smollm2.site("5.k.2") == Site(5, "k", 2)
    with pytest.raises(SiteError) as caught:
        smollm2.site("5.k.3")
    assert str(caught.value) == (
        'no site "5.k.3": smollm2 has key/value heads 0-2 in each layer; did you mean "5.k.2"?'
    )
    assert smollm2.check_inside.passed


def test_a_patch_of_a_key_value_head_equals_slicing_by_hand(smollm2):
    tokens = smollm2.tokenize("When Mary and John went to the store, John gave a drink to")
    layer, new = 5, torch.randn(64, generator=torch.Generator().manual_seed(0))

    def put(_, args, output):
        output = output.clone()
        output[:, 3, 2 * 64 : 3 * 64] = new
        return output

    def change(value):
        value = value.clone()
        value[:, 3, 2] = new
        return value

    projection = smollm2.hf_model.model.layers[layer].self_attn.v_proj
    handle = projection.register_forward_hook(put)
    try:
        with torch.no_grad():
            expected = smollm2.hf_model(input_ids=tokens.ids).logits
    finally:
        handle.remove()
    with torch.no_grad():
        found = logits_with(smollm2, tokens.ids, "v", layer, change)
        assert apart(found, expected) < CLOSE
        assert apart(smollm2.logits(tokens.ids), expected) > 1e-3
