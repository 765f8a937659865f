"""Sites inside a branch, read and edited by name, against plain hooks on the untouched model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from measure.test_paths import IDS, TOYS
from models.test_inside import HEADS, OUT, by_hand, patched, rolled, values, with_places, written_by_hand
from models.test_load import bridge_of
from tiny import LAYERS, SUPPORTED, apart, blocks_of, hooked, some_ids, state_of, tokenizer

import resstream as rs
from resstream.errors import EditError, SiteError, UnsupportedModelError
from resstream.models.trunk import TOLERANCE
from resstream.sites import Site

CLOSE = TOLERANCE[torch.float32]
INNER = ("z", "q", "k", "v", "neuron")
POST_NORM = {
    "gemma2": "post_attention_layernorm",
    "gemma3": "post_attention_layernorm",
    "olmo2": "post_attention_layernorm",
}
NUMBERS = torch.randn(8, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module", params=SUPPORTED)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def hf_model(name):
    return SUPPORTED[name]()


@pytest.fixture(scope="module")
def model(name, hf_model):
    return rs.load(hf_model, name=name, tokenizer=tokenizer())


@pytest.fixture(scope="module")
def llama():
    return rs.load(SUPPORTED["llama"](), name="toy", tokenizer=tokenizer())


few_architectures = pytest.mark.parametrize("name", ["gpt2", "llama", "olmo2", "gptj"], indirect=True)


def kinds_of(model):
    """The kinds that plain hooks see and that the model has."""
    return [kind for kind in INNER if kind in model.parts]


def logits_of(model, ids, *edits):
    with torch.no_grad(), rs.edited(model, *edits) as edited:
        return edited.logits(ids)


def at(position, change):
    """A change of one position only, for a hook."""

    def changed(value):
        new = value.clone()
        new[:, position] = change(value)[:, position]
        return new

    return changed


def at_part(part, change):
    """A change of one part only, for a hook."""

    def changed(value):
        new = value.clone()
        new[:, :, part] = change(value[:, :, part])
        return new

    return changed


# Read


def test_what_is_read_is_what_plain_hooks_see(name, hf_model, model):
    ids = some_ids(2, 9)
    stream = rs.read(model, ids, sites=[*kinds_of(model), "head", "1.z.3", "2.k.0", "1.head.2", "0.resid_post"])
    assert stream.check.passed
    assert torch.equal(stream["0.resid_post"], hooked(hf_model, ids).outputs[0])
    for layer in range(LAYERS):
        for kind in kinds_of(model):
            assert torch.equal(stream[f"{layer}.{kind}"], by_hand(name, hf_model, ids, kind)[layer])
        assert apart(stream[f"{layer}.head"], written_by_hand(name, hf_model, ids, layer)) < CLOSE
    assert torch.equal(stream["1.z.3"], stream["1.z"][:, :, 3])
    assert torch.equal(stream["2.k.0"], stream["2.k"][:, :, 0])
    assert torch.equal(stream["1.head.2"], stream["1.head"][:, :, 2])


def test_a_pattern_is_read_whole_and_by_head(name, model):
    ids = some_ids(2, 9)
    stream = rs.read(model, ids, sites=["pattern", "1.pattern.3"])
    found, _ = values(model, ids, "pattern")
    for layer in range(LAYERS):
        assert torch.equal(stream[f"{layer}.pattern"], found[layer]["pattern"])
    assert stream["1.pattern"].shape == (2, HEADS, 9, 9)
    assert torch.equal(stream["1.pattern.3"], stream["1.pattern"][:, 3])


def test_rows_beyond_a_prompts_end_are_zero(llama):
    prompts, sites = (
        ["w1 w2 w3 w4 w5", "w6 w7"],
        ["1.z", "1.k.1", "1.head.3", "1.pattern", "1.pattern.2", "1.neuron.17"],
    )
    both = rs.read(llama, prompts, sites=sites)
    for row, (prompt, length) in enumerate(zip(prompts, (5, 2), strict=True)):
        alone = rs.read(llama, prompt, sites=sites)
        for site in sites:
            axis = 1 if site == "1.pattern" else 0  # of one prompt
            here, there = both[site][row], alone[site][0]
            if "pattern" in site:
                assert not here.narrow(axis + 1, length, 5 - length).any()
                here = here.narrow(axis + 1, 0, length)
            assert apart(here.narrow(axis, 0, length), there) < CLOSE
            assert not here.narrow(axis, length, 5 - length).any()


def test_positions_are_kept_within_each_prompt(llama):
    prompts, sites = ["w1 w2 w3 w4 w5", "w6 w7 w8"], ["1.z", "1.neuron", "1.neuron.17", "1.pattern", "1.pattern.2"]
    whole = rs.read(llama, prompts, sites=sites)
    last = rs.read(llama, prompts, sites=sites, positions=[-1, 0])
    for site in sites:
        for row, end in enumerate((4, 2)):
            if site == "1.pattern":
                assert torch.equal(last[site][row], whole[site][row][:, [0, end]])
            else:
                assert torch.equal(last[site][row], whole[site][row][[0, end]])
    assert last["1.pattern"].shape == (2, HEADS, 2, 5)
    assert last["1.neuron.17"].shape == (2, 2)


def test_what_is_read_is_a_copy(llama):
    ids = some_ids(1, 5)
    stream = rs.read(llama, ids, sites=["z", "pattern", "q", "neuron"])
    kept = {site: stream[site].clone() for site in stream.sites}
    for site in stream.sites:
        stream[site].mul_(2)
    again = rs.read(llama, ids, sites=["z", "pattern", "q", "neuron"])
    assert all(torch.equal(again[site], kept[site]) for site in kept)


def test_the_proof_is_part_of_the_check(llama):
    plain, inside = (rs.read(llama, some_ids(1, 5), sites=sites).check for sites in ("resid_post", "head"))
    assert inside.error >= plain.error
    assert inside.error == max(plain.error, llama.checks_inside["head"].error)


@few_architectures
def test_a_place_that_is_not_proved_is_neither_read_nor_edited(model):
    """The twin of the tests above: heads in another order."""
    planted = with_places(model, z=rolled)
    for ask in (
        lambda: rs.read(planted, some_ids(1, 4), sites="z"),
        lambda: logits_of(planted, some_ids(1, 4), rs.Zero("0.z.1")),
    ):
        with pytest.raises(UnsupportedModelError, match=r'where "z" is inside the branches of .* could not be proved'):
            ask()


def test_a_bridge_is_read_and_edited_as_the_model_inside_it(llama):
    bridge, ids = rs.load(bridge_of(SUPPORTED["llama"]())), some_ids(2, 7)
    sites = ["1.head.2", "1.z", "1.pattern", "2.neuron.17"]
    found, expected = (rs.read(model, ids, sites=sites) for model in (bridge, llama))
    for site in sites:
        assert apart(found[site], expected[site]) < CLOSE
    edits = rs.Zero("1.head.2"), rs.Scale("2.neuron.17", 3.0)
    assert apart(logits_of(bridge, ids, *edits), logits_of(llama, ids, *edits)) < CLOSE


# Edit

CHANGES = {
    "zero": (lambda site: rs.Zero(site), torch.zeros_like),
    "scale": (lambda site: rs.Scale(site, -0.5), lambda value: -0.5 * value),
    "apply at the last": (
        lambda site: rs.Apply(site, lambda value, _: value.cos(), positions=-1),
        at(-1, lambda value: value.cos()),
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_an_edit_of_a_part_equals_a_hook(case, name, hf_model, model):
    ids = some_ids(2, 9)
    edit, change = CHANGES[case]
    with torch.no_grad():
        for kind in kinds_of(model):
            part = model.parts[kind] - 1
            expected = patched(name, hf_model, ids, kind, 1, at_part(part, change))
            assert apart(logits_of(model, ids, edit(f"1.{kind}.{part}")), expected) < CLOSE
            expected = patched(name, hf_model, ids, kind, 1, change)
            assert apart(logits_of(model, ids, edit(f"1.{kind}")), expected) < CLOSE


def without_heads(name, hf_model, ids, layer, change):
    """The logits when each head's write becomes another, by a hook on what attention writes after all norms."""
    heads = written_by_hand(name, hf_model, ids, layer)
    extra = (change(heads) - heads).sum(2) / (0.3 if name == "granite" else 1)
    module = blocks_of(hf_model)[layer].get_submodule(POST_NORM.get(name, OUT.get(name, "self_attn.o_proj")))
    handle = module.register_forward_hook(lambda _, args, output: output + extra.reshape(output.shape))
    try:
        return hf_model(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()


@pytest.mark.parametrize("case", CHANGES)
def test_an_edit_of_a_head_changes_the_attention_write_by_as_much(case, name, hf_model, model):
    ids = some_ids(2, 9)
    edit, change = CHANGES[case]
    with torch.no_grad():
        expected = without_heads(name, hf_model, ids, 1, at_part(2, change))
        assert apart(logits_of(model, ids, edit("1.head.2")), expected) < CLOSE
        assert apart(hooked(hf_model, ids).logits, expected) > CLOSE, "and the edit is one that shows"
        expected = without_heads(name, hf_model, ids, 1, change)
        assert apart(logits_of(model, ids, edit("1.head")), expected) < CLOSE


def mixed(name, hf_model, ids, layer, pattern):
    """The logits when a layer's pattern becomes another: its product with the values is z, which a hook puts there."""
    v = by_hand(name, hf_model, ids, "v")[layer]
    z = torch.einsum("bhqk,bkhd->bqhd", pattern, v.repeat_interleave(HEADS // v.shape[2], 2))
    return patched(name, hf_model, ids, "z", layer, lambda _: z)


def test_an_edit_of_a_pattern_equals_its_product_with_the_values(name, hf_model, model):
    ids = some_ids(2, 9)
    whole = values(model, ids, "pattern")[0][1]["pattern"]
    one, last = whole.clone(), whole.clone()
    one[:, 3] = 0.5 * whole[:, 3]
    last[:, 3, -1] = torch.full((9,), 1 / 9)
    with torch.no_grad():
        found = logits_of(model, ids, rs.Scale("1.pattern.3", 0.5))
        assert apart(found, mixed(name, hf_model, ids, 1, one)) < CLOSE
        found = logits_of(model, ids, rs.Replace("1.pattern.3", torch.full((9,), 1 / 9), positions=-1))
        assert apart(found, mixed(name, hf_model, ids, 1, last)) < CLOSE
        found = logits_of(model, ids, rs.Replace("1.pattern", last))
        assert apart(found, mixed(name, hf_model, ids, 1, last)) < CLOSE


@few_architectures
def test_edits_with_values_of_their_own(name, hf_model, model):
    ids = some_ids(2, 7)
    rng = np.random.default_rng(5)
    noise = torch.tensor(np.stack([rng.standard_normal(8) for _ in range(7)]), dtype=torch.float32)
    cases = [
        (rs.Replace("1.z.3", NUMBERS, positions=-1), at(-1, lambda value: NUMBERS.expand_as(value))),
        (rs.Add("1.z.3", NUMBERS, positions=[0, 2]), at([0, 2], lambda value: value + NUMBERS)),
        (rs.Noise("1.z.3", std=0.3, seed=5), lambda value: value + 0.3 * noise),
    ]
    with torch.no_grad():
        for edit, change in cases:
            expected = patched(name, hf_model, ids, "z", 1, at_part(3, change))
            assert apart(logits_of(model, ids, edit), expected) < CLOSE


@few_architectures
@pytest.mark.parametrize("kind", ["z", "neuron"])
def test_means_and_samples_of_other_prompts(kind, name, hf_model, model):
    ids, others = some_ids(1, 5), ["w1 w2 w3 w4 w5 w6", "w7 w8 w9 w10 w11"]
    seen = [by_hand(name, hf_model, model.tokenize(text).ids, kind)[1][0] for text in others]
    mean = torch.cat(seen).mean(0)
    with torch.no_grad():
        expected = patched(name, hf_model, ids, kind, 1, lambda value: mean.expand_as(value))
        assert apart(logits_of(model, ids, rs.Mean(f"1.{kind}", others)), expected) < CLOSE
        expected = patched(name, hf_model, ids, kind, 1, at_part(3, lambda value: mean[3].expand_as(value)))
        assert apart(logits_of(model, ids, rs.Mean(f"1.{kind}.3", others)), expected) < CLOSE
        found = logits_of(model, ids, rs.Resample(f"1.{kind}.3", others, seed=1))
        expected = [
            patched(name, hf_model, ids, kind, 1, at_part(3, lambda _, donor=donor: donor[None, :5, 3]))
            for donor in seen
        ]
        assert min(apart(found, each) for each in expected) < CLOSE < max(apart(found, each) for each in expected)


@few_architectures
def test_a_mean_of_head_writes(name, hf_model, model):
    ids, others = some_ids(1, 5), ["w1 w2 w3 w4 w5 w6", "w7 w8 w9"]
    seen = [written_by_hand(name, hf_model, model.tokenize(text).ids, 1)[0, :, 3] for text in others]
    mean = torch.cat(seen).mean(0)
    with torch.no_grad():
        expected = without_heads(name, hf_model, ids, 1, at_part(3, lambda value: mean.expand_as(value)))
        assert apart(logits_of(model, ids, rs.Mean("1.head.3", others)), expected) < CLOSE


def test_edits_act_in_the_order_given(llama):
    """Also where one names a part and the other the whole."""
    ids = some_ids(1, 6)
    add, double = rs.Add("1.z.3", NUMBERS), rs.Scale("1.z", 2.0)
    hf_model = llama.hf_model
    with torch.no_grad():
        first = patched(
            "llama", hf_model, ids, "z", 1, lambda value: 2 * at_part(3, lambda part: part + NUMBERS)(value)
        )
        second = patched("llama", hf_model, ids, "z", 1, at_part(3, lambda part: part + NUMBERS).__call__)
        assert apart(logits_of(llama, ids, add, double), first) < CLOSE
        assert apart(logits_of(llama, ids, add), second) < CLOSE
        second = patched(
            "llama", hf_model, ids, "z", 1, lambda value: at_part(3, lambda part: part + NUMBERS)(2 * value)
        )
        assert apart(logits_of(llama, ids, double, add), second) < CLOSE
        assert apart(first, second) > CLOSE


@few_architectures
def test_edits_at_several_places_of_a_layer_act_together(name, hf_model, model):
    """Inside both branches, on a head's write and on the writes themselves; values above see what was edited below."""
    ids = some_ids(2, 7)
    edits = [rs.Zero("1.k.0"), rs.Scale("1.z.2", 3.0), rs.Zero("1.head.1"), rs.Scale("1.neuron.17", -4.0)]
    with torch.no_grad(), rs.edited(model, *edits) as inside, rs.edited(model, *edits, rs.Scale("1.attn", 2.0)) as both:
        trunk = inside.trunk(inside.tokenize(ids))
        x = trunk.layer(0, trunk.x0)
        attn, read = (
            trunk.write(Site(1, "attn"), x),
            rs.read(inside, ids, sites=["attn", "mlp", "resid_pre", "resid_post", "head", "z"]),
        )
        assert read.check.passed
        assert torch.equal(read["1.attn"], attn)
        assert not read["1.head"][:, :, 1].any()
        mid = x if model.layout == "parallel" else x + 2 * attn
        expected = x + 2 * attn + trunk.write(Site(1, "mlp"), mid)
        doubled = both.trunk(both.tokenize(ids))
        assert apart(doubled.layer(1, x), expected) < CLOSE
        # Head 1 as z: the writes above do not depend on how it was taken away, where no norm follows.
        if name != "olmo2":
            same = rs.Zero("1.k.0"), rs.Scale("1.z.2", 3.0), rs.Zero("1.z.1"), rs.Scale("1.neuron.17", -4.0)
            assert apart(logits_of(model, ids, *same), inside.logits(ids)) < CLOSE


@few_architectures
def test_edits_add_up_on_a_model_that_is_edited_already(model):
    ids = some_ids(2, 7)
    with (
        rs.edited(model, rs.Zero("1.z.2")) as once,
        rs.edited(once, rs.Scale("1.neuron", 0.5)) as twice,
        torch.no_grad(),
    ):
        assert torch.equal(twice.logits(ids), logits_of(model, ids, rs.Zero("1.z.2"), rs.Scale("1.neuron", 0.5)))
        assert twice.parts == model.parts
        assert not rs.read(twice, ids, sites="1.z.2")["1.z.2"].any()


@few_architectures
def test_an_edit_that_changes_nothing_leaves_every_bit(name, hf_model, model):
    ids = some_ids(2, 7)
    for site in ("1.z", "1.q.2", "1.neuron.5"):
        assert torch.equal(logits_of(model, ids, rs.Scale(site, 1.0)), logits_of(model, ids))
    assert apart(logits_of(model, ids, rs.Scale("1.head.2", 1.0)), hooked(hf_model, ids).logits) < CLOSE


@few_architectures
def test_gradients_flow_through_edits(name, hf_model, model):
    ids, part = some_ids(1, 6), by_hand(name, SUPPORTED[name](), some_ids(1, 6), "z")[1][:, :, 3].detach()
    weights = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(5))

    def slope(run):
        leaf = part.clone().requires_grad_()
        return torch.autograd.grad((run(leaf) * weights).sum(), leaf)[0]

    def edited_logits(leaf):
        with rs.edited(model, rs.Replace("1.z.3", leaf)) as edited:
            return edited.logits(ids)

    expected = slope(lambda leaf: patched(name, hf_model, ids, "z", 1, at_part(3, lambda _: leaf)))
    assert apart(slope(edited_logits), expected) < CLOSE

    def head_logits(leaf):
        with rs.edited(model, rs.Apply("1.head.3", lambda value, _: leaf[..., :1] * value)) as edited:
            return edited.logits(ids)

    expected = slope(
        lambda leaf: without_heads(name, hf_model, ids, 1, at_part(3, lambda value: leaf[..., :1] * value))
    )
    assert apart(slope(head_logits), expected) < CLOSE


def test_float64_takes_the_edits_along(llama):
    ids, edits = some_ids(1, 6), (rs.Zero("1.head.2"), rs.Replace("1.z.3", NUMBERS), rs.Scale("1.pattern.0", 0.5))
    with torch.no_grad(), rs.edited(llama, *edits) as edited:
        wide = edited.in_float64()
        assert wide.logits(ids).dtype == torch.float64
        assert apart(edited.logits(ids), wide.logits(ids)) < CLOSE


def test_everything_is_as_it_was(name):
    hf_model = SUPPORTED[name]()
    before, ids = state_of(hf_model), some_ids(1, 5)
    model = rs.load(hf_model, tokenizer=tokenizer())
    rs.read(model, ids, sites=list(model.parts))
    assert state_of(hf_model) == before
    edits = [rs.Scale(f"1.{kind}", 0.5) for kind in model.parts]
    logits_of(model, ids, *edits)
    assert state_of(hf_model) == before
    with pytest.raises(ZeroDivisionError):
        logits_of(model, ids, rs.Apply("1.pattern", lambda value, _: 1 / 0))
    assert state_of(hf_model) == before


# What is refused


def test_parts_that_the_model_does_not_have(llama):
    for ask in (
        lambda site: rs.read(llama, some_ids(1, 3), sites=site),
        lambda site: logits_of(llama, some_ids(1, 3), rs.Zero(site)),
    ):
        with pytest.raises(SiteError) as caught:
            ask("1.k.2")
        assert str(caught.value) == 'no site "1.k.2": toy has key/value heads 0-1 in each layer; did you mean "1.k.1"?'


def test_a_net_without_heads_has_nothing_inside():
    toy = TOYS["tanh"]()
    for ask in (lambda: rs.read(toy, IDS, sites="z"), lambda: logits_of(toy, IDS, rs.Zero("0.head.0"))):
        with pytest.raises(
            UnsupportedModelError, match=r'of the kind "\w+" can be read or edited in .* use a whole write'
        ):
            ask()
    assert dict(toy.parts) == {}
    with pytest.raises(UnsupportedModelError):
        _ = toy.check_inside


def test_a_lens_reads_the_stream_alone(llama):
    with pytest.raises(SiteError) as caught:
        rs.logit_lens(llama, some_ids(1, 3), sites=["1.head.2"])
    assert str(caught.value) == (
        '"1.head.2" lies inside a branch, and a place on the stream is wanted here, such as "1.attn" or '
        '"1.resid_post"; rs.read reads inside branches too'
    )


@pytest.mark.parametrize(
    "edit", [rs.Mean("1.pattern", ["w1 w2"]), rs.Resample("1.pattern.2", ["w1 w2"]), rs.Noise("1.pattern", std=0.1)]
)
def test_what_has_no_pattern_for_every_prompt(edit, llama):
    with pytest.raises(EditError, match=rf"{type(edit).__name__} at .*: a pattern has as many columns as its prompt"):
        logits_of(llama, some_ids(1, 3), edit)


@pytest.mark.parametrize(
    ("site", "shape", "axes"),
    [
        ("1.z", "[1, 3, 4, 8]", "prompt, position, head, d_head"),
        ("1.z.2", "[1, 3, 8]", "prompt, position, d_head"),
        ("1.head", "[1, 3, 4, 32]", "prompt, position, head, d_model"),
        ("1.head.2", "[1, 3, 32]", "prompt, position, d_model"),
        ("1.neuron", "[1, 3, 48]", "prompt, position, neuron"),
        ("1.neuron.17", "[1, 3]", "prompt, position"),
        ("1.pattern", "[1, 4, 3, 3]", "prompt, head, query, key"),
        ("1.pattern.2", "[1, 3, 3]", "prompt, query, key"),
    ],
)
def test_a_value_that_does_not_fit(site, shape, axes, llama):
    with pytest.raises(EditError) as caught:
        logits_of(llama, some_ids(1, 3), rs.Replace(site, torch.zeros(5)))
    assert f'Replace at "{site}" got a tensor of shape [5], but what is there has the shape {shape} ({axes})' in str(
        caught.value
    )


def test_a_head_is_not_skipped_but_zeroed(llama):
    with pytest.raises(
        EditError, match=r'Skip\("1\.head\.2"\) names a value inside a branch; use Zero\("1\.head\.2"\)'
    ):
        logits_of(llama, some_ids(1, 3), rs.Skip("1.head.2"))


# SmolLM2


def test_smollm2_by_name(smollm2):
    text, ids = "The Eiffel Tower is in the city of", smollm2.tokenize("The Eiffel Tower is in the city of").ids
    stream = rs.read(smollm2, text, sites=["5.head.3", "7.z", "3.pattern", "2.neuron"])
    assert [tuple(stream[site].shape) for site in stream.sites] == [
        (1, 9, 576),
        (1, 9, 9, 64),
        (1, 9, 9, 9),
        (1, 9, 1536),
    ]
    assert stream.check.passed
    layers, seen = smollm2.hf_model.model.layers, {}

    def look(_, args):
        seen["z"] = args[0]

    handle = layers[5].self_attn.o_proj.register_forward_pre_hook(look)
    try:
        with torch.no_grad():
            smollm2.hf_model(input_ids=ids)
    finally:
        handle.remove()
    weight = layers[5].self_attn.o_proj.weight[:, 3 * 64 : 4 * 64]
    with torch.no_grad():
        assert apart(stream["5.head.3"], seen["z"][..., 3 * 64 : 4 * 64] @ weight.T) < CLOSE
