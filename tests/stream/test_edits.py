"""Edits of the stream against the same changes made by plain forward hooks on the untouched model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models.test_trunk import plant
from stream.test_read import ARCHITECTURES, CLOSE, Planted, by_hooks, kinds_of, says, unchecked
from tiny import LAYERS, apart, blocks_of, some_ids, state_of, tokenizer

import resstream as rs
from resstream.errors import EditError, PromptError, SiteError
from resstream.models.causal_lm import CausalTrunk
from resstream.sites import Site

NAMES = ("gpt2", "llama", "neox_parallel", "gemma2", "granite")
LENGTH = 7
VECTOR = torch.randn(32, generator=torch.Generator().manual_seed(3))
STATES = torch.randn(LENGTH, 32, generator=torch.Generator().manual_seed(4))


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


def at(position, change):
    """A change of one position only, for a hook."""

    def changed(value):
        new = value.clone()
        new[:, position] = change(value)[:, position]
        return new

    return changed


def noise(std, seed):
    """Noise as documented: drawn number by number, position by position."""
    rng = np.random.default_rng(seed)
    drawn = torch.tensor([[rng.standard_normal() for _ in range(32)] for _ in range(LENGTH)])
    return lambda value: value + std * drawn[: value.shape[1]].to(value)


# Each edit, and the same by hand.
CHANGES = {
    "replace": (lambda site: rs.Replace(site, VECTOR), lambda value: VECTOR.expand_as(value)),
    "replace all": (lambda site: rs.Replace(site, STATES), lambda value: STATES[None].clone()),
    "add": (lambda site: rs.Add(site, VECTOR), lambda value: value + VECTOR),
    "add last": (lambda site: rs.Add(site, VECTOR, positions=-1), at(-1, lambda value: value + VECTOR)),
    "scale": (lambda site: rs.Scale(site, -0.5), lambda value: -0.5 * value),
    "scale one": (lambda site: rs.Scale(site, 2.0, positions=2), at(2, lambda value: 2 * value)),
    "zero": (lambda site: rs.Zero(site), torch.zeros_like),
    "zero some": (lambda site: rs.Zero(site, positions=[0, -2]), at([0, -2], torch.zeros_like)),
    "zero slice": (lambda site: rs.Zero(site, positions=slice(1, 4)), at(slice(1, 4), torch.zeros_like)),
    "noise": (lambda site: rs.Noise(site, std=0.3, seed=5), noise(0.3, 5)),
    "apply": (lambda site: rs.Apply(site, lambda value, _: value.clamp(min=0)), lambda value: value.clamp(min=0)),
    "apply first": (
        lambda site: rs.Apply(site, lambda value, _: value.roll(1, 1).sin(), positions=0),
        at(0, lambda value: value.roll(1, 1).sin()),
    ),
}


def edit_equals_hook(name, hf_model, model, edits, changes):
    ids = some_ids(1, LENGTH)
    with torch.no_grad():
        expected, base = by_hooks(name, hf_model, ids, changes), by_hooks(name, hf_model, ids)
        with rs.edited(model, *edits) as m:
            logits = m.logits(ids)
    assert apart(logits[0], expected.logits) < 2 * CLOSE
    assert apart(expected.logits, base.logits) > 1e-4, "and the edit does something"


# A stream of zeros has no norm to speak of, so states are zeroed at some positions only, and middles, which hooks reach
# by a difference, not at all.
SOME = ("replace all", "add last", "scale one", "noise", "apply first")
CASES = {
    "attn": tuple(CHANGES),
    "mlp": (*SOME, "zero"),
    "resid_pre": (*SOME, "zero some"),
    "resid_post": (*SOME, "zero slice"),
    "resid_mid": SOME,
}
PLACES = [(name, kind) for name in NAMES for kind in kinds_of(name)]
every_place = pytest.mark.parametrize(("name", "kind"), PLACES, indirect=["name"])


@every_place
def test_an_edit_equals_a_hook(name, kind, hf_model, model):
    for edit, change in map(CHANGES.get, CASES[kind]):
        edit_equals_hook(name, hf_model, model, [edit(f"1.{kind}")], {f"1.{kind}": change})


@pytest.mark.parametrize("kind", ["attn", "mlp"])
def test_an_edit_that_is_off_is_noticed(kind, name, hf_model, model, monkeypatch):
    """The twin of the test above: an error of 0.1 % in the write that is edited."""
    plant(monkeypatch, CausalTrunk, "write", kind)
    edit, change = CHANGES["scale"]
    with pytest.raises(AssertionError):
        edit_equals_hook(name, hf_model, model, [edit(f"1.{kind}")], {f"1.{kind}": change})


def test_the_ends_of_the_stream(name, hf_model, model):
    changes = {"0.resid_pre": lambda value: value + VECTOR, f"{LAYERS - 1}.resid_post": lambda value: 2 * value - 1}
    edits = [rs.Add("embed", VECTOR), rs.Apply("final", lambda value, site: 2 * value - 1)]
    edit_equals_hook(name, hf_model, model, edits, changes)


def test_edits_everywhere_at_once(name, hf_model, model):
    some = {f"{layer}.{kind}": case for kind in kinds_of(name) for layer, case in ((0, "scale one"), (2, "add"))}
    edits = [CHANGES[case][0](site) for site, case in some.items()]
    edit_equals_hook(name, hf_model, model, edits, {site: CHANGES[case][1] for site, case in some.items()})


def test_edits_at_one_site_act_in_order(name, hf_model, model):
    plus, times = rs.Add("1.mlp", VECTOR), rs.Scale("1.mlp", 3.0)
    edit_equals_hook(name, hf_model, model, [plus, times], {"1.mlp": lambda value: 3 * (value + VECTOR)})
    edit_equals_hook(name, hf_model, model, [times, plus], {"1.mlp": lambda value: 3 * value + VECTOR})
    edit_equals_hook(name, hf_model, model, [rs.Skip("1.mlp"), plus], {"1.mlp": lambda value: VECTOR.expand_as(value)})
    edit_equals_hook(name, hf_model, model, [plus, rs.Skip("1.mlp")], {"1.mlp": torch.zeros_like})


def test_edits_of_an_edited_model_come_on_top(name, hf_model, model):
    changes = {
        "0.resid_pre": lambda value: value + VECTOR,
        "1.attn": lambda value: 3 * (value - VECTOR),
        "1.resid_post": lambda value: 0.5 * value,
        "2.mlp": torch.zeros_like,
    }
    with rs.edited(model, rs.Add("embed", VECTOR), rs.Add("1.attn", -VECTOR), rs.Scale("1.resid_post", 0.5)) as m:
        edit_equals_hook(name, hf_model, m, [rs.Scale("1.attn", 3.0), rs.Skip("2.mlp")], changes)


# Mean and Resample: what stands in for a value comes from reference prompts


REFERENCE = [
    f"w{number} w2 w3 w4 w5 w6 w{number} w8 w9"[: 3 * length].strip() for number, length in enumerate((9, 4, 2, 7, 5))
]


def by_hand(name, hf_model, model, site):
    """What each reference prompt has at a site, by hooks, each run alone and unpadded."""
    with torch.no_grad():
        runs = [by_hooks(name, hf_model, model.tokenize(prompt).ids) for prompt in REFERENCE]
    return [run.values[site] for run in runs]


@pytest.mark.parametrize("kind", ["resid_pre", "resid_post", "attn", "mlp"])
def test_mean_equals_a_hook(kind, name, hf_model, model):
    """Case 10: over five prompts of unequal length, padding excluded."""
    site = f"1.{kind}"
    references = by_hand(name, hf_model, model, site)
    assert len({len(each) for each in references}) == 5
    mean = torch.cat(references).mean(dim=0)
    edit_equals_hook(name, hf_model, model, [rs.Mean(site, REFERENCE)], {site: lambda value: mean.expand_as(value)})
    last = rs.Mean(site, REFERENCE, positions=-1)
    edit_equals_hook(name, hf_model, model, [last], {site: at(-1, lambda value: mean.expand_as(value))})


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 2, 0, 1, 3)])
def test_mean_does_not_depend_on_the_batch(order, name, model):
    """Case 10: of one batch, in any order and with any padding, and of its prompts one by one."""
    ids = some_ids(2, LENGTH)
    batched = rs.Mean("1.mlp", [REFERENCE[number] for number in order]).prepare(model).value
    alone = [rs.read(model, prompt, sites="1.mlp")["1.mlp"][0] for prompt in REFERENCE]
    assert apart(batched, torch.cat(alone).mean(dim=0).to(batched)) < CLOSE
    pairs = [rs.read(model, REFERENCE[part], sites="1.mlp") for part in (slice(0, 2), slice(2, 4), slice(4, 5))]
    rows = [row[:n] for stream in pairs for row, n in zip(stream["1.mlp"], stream.tokens.lengths, strict=True)]
    assert apart(batched, torch.cat(rows).mean(dim=0).to(batched)) < CLOSE
    with torch.no_grad(), rs.edited(model, rs.Mean("1.mlp", REFERENCE)) as m:
        assert apart(m.logits(ids)[1:], m.logits(ids[1:])) < CLOSE


def test_a_mean_that_counts_padding_is_noticed(toy):
    """The twin of the test above."""
    stream = rs.read(toy, REFERENCE, sites="1.mlp")
    batched = rs.Mean("1.mlp", REFERENCE).prepare(toy).value
    assert apart(stream["1.mlp"].mean(dim=(0, 1)).to(batched), batched) > 0.1


@every_place
def test_resample_equals_a_hook(name, kind, hf_model, model):
    """One reference prompt of those that are long enough, position by position."""
    site, ids = f"1.{kind}", some_ids(1, LENGTH)
    donors = [donor for donor in by_hand(name, hf_model, model, site) if len(donor) >= LENGTH]
    assert len(donors) == 2
    with torch.no_grad():
        expected = [
            by_hooks(name, hf_model, ids, {site: lambda _, d=donor: d[None, :LENGTH].clone()}) for donor in donors
        ]
        drawn = set()
        for seed in range(8):
            with rs.edited(model, rs.Resample(site, REFERENCE, seed=seed)) as m:
                logits, again = m.logits(ids)[0], m.logits(ids)[0]
            assert torch.equal(logits, again)
            errors = [apart(logits, each.logits) for each in expected]
            assert min(errors) < 2 * CLOSE < max(errors)
            drawn.add(errors.index(min(errors)))
    assert drawn == {0, 1}, "and each is drawn some time"


def test_resample_of_few_positions_needs_no_more_than_these(toy):
    """A short reference serves an early position; a prompt without the position is left as it is."""
    ids = some_ids(1, LENGTH)
    (donor,) = by_hand("llama", toy.hf_model, toy, "1.attn")[2:3]
    with torch.no_grad():
        expected = by_hooks("llama", toy.hf_model, ids, {"1.attn": at(1, lambda v: donor[None, 1:2].expand_as(v))})
        with rs.edited(toy, rs.Resample("1.attn", REFERENCE[2], positions=1)) as m:
            assert apart(m.logits(ids)[0], expected.logits) < CLOSE
        with rs.edited(toy, rs.Resample("1.attn", REFERENCE[2], positions=slice(10, None))) as m:
            assert apart(m.logits(ids), toy.logits(ids)) < CLOSE


@pytest.mark.parametrize(
    "edit", [rs.Noise("1.attn", 0.5, seed=2), rs.Noise("embed", 0.5), rs.Resample("1.mlp", REFERENCE)]
)
def test_what_is_random_does_not_depend_on_the_batch(edit, name, model):
    prompts = ["w1 w2 w3 w4 w5 w6", "w9 w8 w7", "w1 w2 w3 w4 w5 w6", "w3 w1 w4 w1 w5"]
    with torch.no_grad(), rs.edited(model, edit) as m:
        logits = m.logits(prompts)
        for row, prompt in enumerate(prompts):
            alone = m.logits(prompt)[0]
            assert apart(logits[row, : len(alone)], alone) < CLOSE


def test_noise_leaves_the_global_random_state_alone(toy):
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    with torch.no_grad():
        logits = []
        for seed in (0, 0, 1):
            with rs.edited(toy, rs.Noise("embed", 0.1, seed=seed)) as m:
                logits += [m.logits(some_ids(1, 5)), m.logits(some_ids(1, 5))]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert all(torch.equal(each, logits[0]) for each in logits[:4]), "the same for the same seed"
    assert apart(logits[4], logits[0]) > 1e-4


# Layers skipped and reordered


def blocks_by_hand(hf_model, ids, order):
    """Run the blocks in another order: each with the arguments that the model gives it, one after the other."""
    calls = []

    def note(_, args, kwargs):
        calls.append((args, kwargs))

    blocks = blocks_of(hf_model)
    handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    hf_model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    args, kwargs = calls[0]
    x = args[0] if args else kwargs["hidden_states"]
    for layer in order:
        args, kwargs = calls[layer]
        output = blocks[layer](x, *args[1:], **{key: value for key, value in kwargs.items() if key != "hidden_states"})
        x = output if isinstance(output, torch.Tensor) else output[0]
    handle = blocks[-1].register_forward_hook(
        lambda _, args, output: x if isinstance(output, torch.Tensor) else (x, *output[1:])
    )
    logits = hf_model(input_ids=ids, use_cache=False).logits
    handle.remove()
    return logits


ORDERS = {
    "reverse": ([rs.Reorder([2, 1, 0])], [2, 1, 0]),
    "twice": ([rs.Reorder([0, 1, 1, 2, 1])], [0, 1, 1, 2, 1]),
    "from the end": ([rs.Reorder([-1, 0])], [2, 0]),
    "skip": ([rs.Skip(1)], [0, 2]),
    "skip the last": ([rs.Skip(-1)], [0, 1]),
    "skip two": ([rs.Skip(0), rs.Skip(2)], [1]),
    "skip all": ([rs.Reorder([])], []),
    "skip and reorder": ([rs.Skip(0), rs.Reorder([2, 0, 1])], [2, 1]),
}


@pytest.mark.parametrize("case", ORDERS)
def test_layers_in_another_order_are_blocks_run_by_hand(case, name, hf_model, model):
    edits, order = ORDERS[case]
    ids = some_ids(2, 12)  # longer than the window of the layers that have one
    with torch.no_grad():
        expected, plain = blocks_by_hand(hf_model, ids, order), hf_model(input_ids=ids).logits
        with rs.edited(model, *edits) as m:
            assert apart(m.logits(ids), expected) < CLOSE
    assert apart(plain, expected) > 1e-3


def test_another_order_is_noticed(name, hf_model, model):
    """The twin of the test above."""
    ids = some_ids(2, 12)
    with torch.no_grad(), rs.edited(model, rs.Reorder([0, 2, 1])) as m:
        assert apart(m.logits(ids), blocks_by_hand(hf_model, ids, [1, 0, 2])) > 1e-4


@pytest.mark.parametrize("kind", ["attn", "mlp"])
def test_a_skipped_branch_writes_nothing(kind, name, hf_model, model):
    edit_equals_hook(name, hf_model, model, [rs.Skip(f"1.{kind}")], {f"1.{kind}": torch.zeros_like})


def test_edits_in_another_order(name, hf_model, model):
    """Edits follow their layers; the ends of the stream are where the edited model begins and ends."""
    ids = some_ids(1, LENGTH)
    changes = {"1.resid_pre": lambda value: value + VECTOR, "2.resid_post": lambda value: value - VECTOR}
    with torch.no_grad():
        first = by_hooks(name, hf_model, ids).values["0.resid_pre"]
        expected = by_hooks(name, hf_model, ids, {"0.resid_post": lambda value: first[None].clone(), **changes})
        with rs.edited(model, rs.Skip(0), rs.Add("embed", VECTOR), rs.Add("final", -VECTOR)) as m:
            assert apart(m.logits(ids)[0], expected.logits) < CLOSE


def test_nested_orders(name, hf_model, model):
    ids = some_ids(1, LENGTH)
    with torch.no_grad(), rs.edited(model, rs.Skip(1)) as outer, rs.edited(outer, rs.Scale("2.mlp", 1.0)) as m:
        assert apart(m.logits(ids), blocks_by_hand(hf_model, ids, [0, 2])) < CLOSE
        with rs.edited(outer, rs.Skip(2)) as m:
            assert apart(m.logits(ids), blocks_by_hand(hf_model, ids, [0])) < CLOSE


UNCHANGED = {
    "no edit": [],
    "identity reorder": [rs.Reorder(range(LAYERS))],
    "zero times nothing": [rs.Add("1.resid_post", torch.zeros(32))],
    "no positions": [rs.Replace("1.resid_pre", VECTOR, positions=slice(20, None))],
    "itself": [rs.Apply("1.resid_post", lambda value, site: value)],
}


@pytest.mark.parametrize("case", UNCHANGED)
def test_what_changes_nothing_is_the_base_bit_for_bit(case, name, model):
    ids = some_ids(2, LENGTH)
    with torch.no_grad(), rs.edited(model, *UNCHANGED[case]) as m:
        assert torch.equal(m.logits(ids), model.logits(ids))
        assert torch.equal(rs.read(m, ids, sites="final")["final"], rs.read(model, ids, sites="final")["final"])


# Positions in a padded batch


@pytest.mark.parametrize("kind", ["resid_pre", "attn", "resid_post"])
@pytest.mark.parametrize("positions", [-1, [0, -2], slice(-2, None)])
def test_positions_count_within_each_prompt(positions, kind, name, hf_model, model):
    prompts = ["w1 w2 w3 w4 w5 w6", "w9 w8 w7"]
    with torch.no_grad(), rs.edited(model, rs.Add(f"1.{kind}", VECTOR, positions=positions)) as m:
        logits = m.logits(prompts)
        for row, prompt in enumerate(prompts):
            ids = model.tokenize(prompt).ids
            expected = by_hooks(name, hf_model, ids, {f"1.{kind}": at(positions, lambda value: value + VECTOR)})
            assert apart(logits[row, : ids.shape[1]], expected.logits) < 2 * CLOSE


# Gradients


def gradient_by_hooks(name, hf_model, ids, site, vector):
    logits = by_hooks(name, hf_model, ids, {site: lambda value: value + vector}).logits
    return torch.autograd.grad(logits[-1, 7] - logits[-1, 9], vector)[0]


def gradient_of_edit(model, ids, site, vector):
    with rs.edited(model, rs.Add(site, vector)) as m:
        logits = m.logits(ids)[0]
    return torch.autograd.grad(logits[-1, 7] - logits[-1, 9], vector)[0]


@every_place
def test_gradients_flow_through_edits(name, kind, hf_model, model):
    ids, vector = some_ids(1, LENGTH), VECTOR.clone().requires_grad_()
    expected = gradient_by_hooks(name, hf_model, ids, f"1.{kind}", vector)
    assert apart(gradient_of_edit(model, ids, f"1.{kind}", vector), expected) < 5 * CLOSE
    with torch.no_grad(), torch.enable_grad():
        assert apart(gradient_of_edit(model, ids, f"1.{kind}", vector), expected) < 5 * CLOSE
    with torch.no_grad(), rs.edited(model, rs.Add(f"1.{kind}", vector)) as m:
        assert not m.logits(ids).requires_grad
    assert all(parameter.grad is None for parameter in hf_model.parameters())


def test_a_gradient_that_is_off_is_noticed(name, hf_model, model, monkeypatch):
    """The twin of the test above."""
    ids, vector = some_ids(1, LENGTH), VECTOR.clone().requires_grad_()
    expected = gradient_by_hooks(name, hf_model, ids, "1.resid_pre", vector)
    plant(monkeypatch, CausalTrunk, "layer")
    assert apart(gradient_of_edit(model, ids, "1.resid_pre", vector), expected) > 5 * CLOSE


def test_gradients_flow_through_apply(toy):
    ids, factor = some_ids(1, LENGTH), torch.tensor(0.7, requires_grad=True)
    logits = by_hooks("llama", toy.hf_model, ids, {"1.mlp": lambda value: factor * value}).logits
    (expected,) = torch.autograd.grad(logits[-1, 7], factor)
    with rs.edited(toy, rs.Apply("1.mlp", lambda value, site: factor * value)) as m:
        (found,) = torch.autograd.grad(m.logits(ids)[0, -1, 7], factor)
    assert apart(found, expected) < 5 * CLOSE


# An edited model is a model


def test_an_edited_model_can_be_read(name, hf_model, model):
    """Each place is read as it is after its edits, and everything above follows from it."""
    ids = some_ids(1, LENGTH)
    some = {
        f"1.{kind}": case
        for kind, case in zip(kinds_of(name), ("add", "scale one", "zero some", "scale", "add"), strict=False)
    }
    changes = {site: CHANGES[case][1] for site, case in some.items()}
    with torch.no_grad():
        seen = by_hooks(name, hf_model, ids, changes)
    with rs.edited(model, *(CHANGES[case][0](site) for site, case in some.items())) as m:
        stream = rs.read(m, ids, sites=kinds_of(name))
    for site, expected in seen.values.items():
        assert apart(stream[site][0], expected) < 2 * CLOSE, site
    assert apart(stream.logits[0], seen.logits) < 2 * CLOSE
    assert stream.check.passed


def test_an_edited_model_is_read_in_its_own_order(model):
    ids = some_ids(1, LENGTH)
    with rs.edited(model, rs.Skip(1)) as m:
        stream = rs.read(m, ids, sites=["resid_pre", "resid_post", "embed", "final"])
        assert stream.sites == ("0.resid_pre", "2.resid_pre", "0.resid_post", "2.resid_post")
        assert torch.equal(stream["0.resid_post"], stream["2.resid_pre"])
        with pytest.raises(SiteError) as error:
            rs.read(m, ids, sites="1.attn")
    assert says(error, 'no site "1.attn"', f"layer 1 of {model.name} (edited) is skipped", "name a layer that runs")


def test_an_edited_model_has_a_lens(name, hf_model, model):
    ids = some_ids(1, LENGTH)
    with torch.no_grad():
        seen = by_hooks(name, hf_model, ids, {"1.attn": lambda value: value + VECTOR})
    with rs.edited(model, rs.Add("1.attn", VECTOR)) as m:
        lens = rs.logit_lens(m, ids, sites="final", targets=5)
    expected = seen.logits.log_softmax(-1)[:, 5]
    assert apart(torch.from_numpy(lens.data.log_prob.values[0, 0]), expected.double()) < CLOSE
    assert lens.check.passed


@pytest.mark.parametrize("measure", ["patch_activations", "ablate_layers", "path_lengths"])
def test_measures_that_take_layers_apart_refuse_an_edited_model(measure, toy):
    arguments = {"patch_activations": ("w1 w2", "w1 w3", rs.logit_diff(4, 5))}.get(measure, ("w1 w2",))
    with rs.edited(toy, rs.Skip(1)) as m, pytest.raises(EditError) as error:
        getattr(rs, measure)(m, *arguments)
    assert says(error, measure, "toy (edited)", "pass the model that rs.load returned")


def test_generate_on_smollm2_equals_a_greedy_loop_with_hooks(smollm2):
    prompt, vector = "The Eiffel Tower is in the city of", 40 * torch.sin(torch.arange(576.0))
    add = rs.Add("8.resid_post", vector, positions=-1)
    ids = smollm2.tokenizer(prompt, return_tensors="pt")["input_ids"]
    plain = ids

    def steer(_, args, output):
        output = output.clone()
        output[:, -1] += vector
        return output

    with torch.no_grad():
        for _ in range(5):
            plain = torch.cat([plain, smollm2.hf_model(input_ids=plain).logits[:, -1:].argmax(-1)], dim=1)
            handle = blocks_of(smollm2.hf_model)[8].register_forward_hook(steer)
            ids = torch.cat([ids, smollm2.hf_model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
            handle.remove()
    with rs.edited(smollm2, add) as m:
        assert m.generate(prompt, max_new_tokens=5) == smollm2.tokenizer.decode(ids[0])
    with rs.edited(smollm2) as m:
        assert m.generate(prompt, max_new_tokens=5) == smollm2.tokenizer.decode(plain[0])
    assert ids.tolist() != plain.tolist()


# After every call, also one that raises


def test_the_model_is_as_it_was(name):
    hf_model = ARCHITECTURES[name]()
    model = rs.load(hf_model, tokenizer=tokenizer())
    before = state_of(hf_model)
    edits = [CHANGES[case][0]("1.mlp") for case in CHANGES if case != "replace all"]
    with rs.edited(model, *edits, rs.Mean("0.attn", REFERENCE), rs.Skip(2)) as m:
        assert state_of(hf_model) == before
        m.logits("w1 w2 w3 w4")
        m.generate("w1 w2 w3 w4", max_new_tokens=2)
        assert state_of(hf_model) == before

    def fail(value, site):
        raise Planted

    with pytest.raises(Planted), rs.edited(model, rs.Apply("1.attn", fail)) as m:
        m.logits("w1 w2")
    assert state_of(hf_model) == before
    with pytest.raises(Planted), rs.edited(model, rs.Zero("1.attn")) as m:
        fail(m.logits("w1 w2"), "")
    assert state_of(hf_model) == before
    assert not [hook for module in hf_model.modules() for hook in (*module._forward_hooks, *module._forward_pre_hooks)]


def test_apply_gets_a_copy_and_the_site(toy):
    """A function may work in place: what others read is not touched."""
    sites = []

    def wipe(value, site):
        sites.append(site)
        return value.zero_()

    ids = some_ids(1, LENGTH)
    with torch.no_grad(), rs.edited(toy, rs.Apply("embed", wipe, positions=0)) as m:
        found = m.logits(ids)
    assert sites == ["0.resid_pre"]
    with torch.no_grad():
        expected = by_hooks("llama", toy.hf_model, ids, {"0.resid_pre": at(0, torch.zeros_like)})
    assert apart(found[0], expected.logits) < CLOSE


# Errors

WRONG_SITE = {
    "unknown kind": (lambda: rs.Zero("1.atn"), 'no site "1.atn"', "toy has", 'did you mean "1.attn"?'),
    "unknown layer": (lambda: rs.Zero("3.attn"), 'no site "3.attn"', "layers 0-2", 'did you mean "2.attn"?'),
    "unknown branch": (lambda: rs.Skip("3.attn"), 'no site "3.attn"', "layers 0-2", 'did you mean "2.attn"?'),
    "layer to skip": (lambda: rs.Skip(3), "no layer 3", "layers 0-2", "did you mean 2?"),
    "layer in order": (lambda: rs.Reorder([0, 4]), "no layer 4", "layers 0-2", "did you mean 2?"),
    "mean": (lambda: rs.Mean("3.mlp", "w1 w2"), 'no site "3.mlp"', "layers 0-2", 'did you mean "2.mlp"?'),
}


@pytest.mark.parametrize("case", WRONG_SITE)
def test_an_unknown_site(case, toy):
    edit, *parts = WRONG_SITE[case]
    with pytest.raises(SiteError) as error, rs.edited(toy, edit()):
        pass
    assert says(error, *parts)


def test_an_edit_that_could_never_act(toy):
    with pytest.raises(SiteError) as error, rs.edited(toy, rs.Zero("1.attn"), rs.Skip(1)):
        pass
    assert says(error, 'no site "1.attn"', "layer 1 of toy (edited) is skipped", "name a layer that runs")


@pytest.mark.parametrize("thing", ["1.attn", 7, rs.Zero, None])
def test_what_is_not_an_edit(thing, toy):
    with unchecked(), pytest.raises(EditError) as error, rs.edited(toy, thing):
        pass
    assert says(error, repr(thing), "is not an edit", "use Replace, Add, Scale")


def test_a_state_cannot_be_skipped(toy):
    with pytest.raises(EditError) as error, rs.edited(toy, rs.Skip("1.resid_pre")):
        pass
    assert says(error, 'Skip("1.resid_pre")', "a state of the stream", 'Skip(1), or a branch, Skip("1.attn")')


@pytest.mark.parametrize("shape", [(31,), (5, 32), (2, LENGTH, 32)])
@pytest.mark.parametrize("edit", [rs.Replace, rs.Add])
def test_a_value_that_does_not_fit(edit, shape, toy):
    with rs.edited(toy, edit("1.attn", torch.zeros(shape))) as m, pytest.raises(EditError) as error:
        m.logits(some_ids(1, LENGTH))
    assert says(
        error, f'{edit.__name__} at "1.attn"', f"shape {list(shape)}", f"[1, {LENGTH}, 32]", "a vector of 32 numbers"
    )


def test_a_function_that_returns_something_else(toy):
    with rs.edited(toy, rs.Apply("1.attn", lambda value, site: value[..., :5])) as m, pytest.raises(EditError) as error:
        m.logits(some_ids(1, LENGTH))
    assert says(error, 'Apply at "1.attn"', f"[1, {LENGTH}, 5]", f"[1, {LENGTH}, 32]", "broadcasts to it")
    nothing = rs.Apply("1.attn", lambda value, site: None)
    with rs.edited(toy, nothing) as m, pytest.raises(EditError) as error:
        m.logits(some_ids(1, LENGTH))
    assert says(error, '"1.attn"', "returned NoneType", f"a tensor of shape [1, {LENGTH}, 32]")


@pytest.mark.parametrize("positions", [LENGTH, -LENGTH - 1, [0, LENGTH]])
def test_a_position_that_a_prompt_does_not_have(positions, toy):
    with rs.edited(toy, rs.Zero("1.attn", positions=positions)) as m, pytest.raises(PromptError) as error:
        m.logits(some_ids(1, LENGTH))
    assert says(error, "no position", f"prompt 0 has {LENGTH} tokens", f"use -{LENGTH} to {LENGTH - 1}")


def test_a_reference_that_is_too_short(toy):
    with rs.edited(toy, rs.Resample("1.attn", REFERENCE[1:3])) as m, pytest.raises(EditError) as error:
        m.logits(some_ids(1, LENGTH))
    assert says(
        error, 'Resample at "1.attn"', f"position {LENGTH - 1}", "the longest has 4 tokens", "longer reference prompts"
    )


@pytest.mark.parametrize("edit", [rs.Mean("1.attn", "w1 w2"), rs.Resample("1.attn", "w1 w2")])
def test_an_edit_that_never_met_a_model(edit, toy):
    with pytest.raises(EditError) as error:
        edit.apply(torch.zeros(1, 2, 32), toy.tokenize("w1 w2"), Site(1, "attn"))
    assert says(error, type(edit).__name__, "reads its prompts through a model", "rs.edited(model, edit)")
