"""Situations in which patching is often wrong: training mode, shared keys, padding, gates, leaks, names of places."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from measure.test_paths import WIDTH, ToyModel
from tiny import LAYERS, SUPPORTED, blocks_of, state_of, tokenizer

import resstream as rs
from resstream.errors import PromptError, SiteError

CLEAN, CORRUPTED = ["w1 w2 w3 w4 w5", "w9 w8 w7"], ["w1 w6 w3 w4 w2", "w9 w4 w7"]
METRIC = rs.logit_diff([4, 5], 7)
INSIDE = ("z", "q", "k", "v", "pattern", "neuron")
PARIS = ("The Eiffel Tower is in the city of", "The Louvre Museum is in the city of")
STORE = "When Mary and John went to the store, {} gave a drink to"
PARK = "Then Mary and John had a long talk in the old park, and after that {} gave a book to"
HOUSE = "Mary and John met, and {} sent a letter to"


@pytest.fixture(scope="module", params=["gpt2", "llama", "neox_parallel"])
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
    return rs.load(SUPPORTED["llama"](), name="llama", tokenizer=tokenizer())


def patched(model, clean=CLEAN, corrupted=CORRUPTED, metric=METRIC, **options):
    return rs.patch_activations(model, clean, corrupted, metric, **options).data


def alike(one, other):
    """Bit for bit, NaN where the other has NaN."""
    return one.equals(other)


# 1: dropout


@pytest.mark.parametrize("kind", ["resid_pre", "mlp", "pattern"])
def test_training_mode_changes_nothing(kind, name, model):
    """A model whose dropout is on is run with its dropout off, and is in training mode again afterwards."""
    training = SUPPORTED[name]().train()
    drops = any(module.p > 0 for module in training.modules() if isinstance(module, torch.nn.Dropout))
    assert drops == (name == "gpt2")
    in_training = rs.load(training, name=name, tokenizer=tokenizer())
    before = state_of(training)
    assert alike(patched(in_training, sites=kind), patched(model, sites=kind))
    with pytest.warns(UserWarning, match="same metric"):
        same = patched(in_training, corrupted=CLEAN, sites=kind)
    assert ((same.metric == same.clean) | same.metric.isnull()).all()
    assert state_of(training) == before


# 5: grouped queries


@contextmanager
def hooked(module, change):
    """A hook that changes what a module returns."""
    handle = module.register_forward_hook(lambda _, args, output: change(output))
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("layer", [0, 17, 29])
def test_a_key_value_head_is_a_slice_of_its_projection(kind, layer, smollm2):
    """The third of three key/value heads, which three of nine query heads share, sliced by hand."""
    hf_model, attention = smollm2.hf_model, smollm2.hf_model.model.layers[layer].self_attn
    projection = {"k": attention.k_proj, "v": attention.v_proj}[kind]
    clean, corrupted = (smollm2.tokenize(STORE.format(name)).ids for name in ("John", "Mary"))
    mary, john = (smollm2.tokenizer(name)["input_ids"][0] for name in (" Mary", " John"))
    seen = []

    def splice(output):
        output = output.clone()
        output[..., 2 * 64 : 3 * 64] = seen[0][..., 2 * 64 : 3 * 64]
        return output

    with torch.no_grad():
        with hooked(projection, seen.append):
            hf_model(input_ids=clean)
        with hooked(projection, splice):
            last = hf_model(input_ids=corrupted).logits[0, -1]
    expected = float(last[mary] - last[john])
    data = patched(
        smollm2, clean, corrupted, rs.logit_diff(" Mary", " John"), sites=kind, positions="all", layers=layer
    )
    found = data.metric[0, 0, 0]
    assert data.sizes["head"] == 3
    assert abs(float(found.sel(head=2)) - expected) < 2e-5
    assert all(abs(float(found.sel(head=head)) - expected) > 2e-4 for head in (0, 1)), "and the other two are others"


@pytest.mark.parametrize("kind", ["k", "v"])
def test_there_is_no_fourth_key_value_head(kind, smollm2):
    with pytest.raises(SiteError, match=r"no head 3.*has heads 0-2"):
        patched(smollm2, *PARIS, rs.log_prob(" Paris"), sites=kind, heads=3)


# 7: everything, nothing


@pytest.mark.parametrize("kind", INSIDE)
def test_a_value_inside_patched_with_itself_changes_nothing(kind, model):
    with pytest.warns(UserWarning, match="same metric"):
        data = patched(model, corrupted=CLEAN, sites=kind)
    assert ((data.metric == data.clean) | data.metric.isnull()).all()


@pytest.mark.parametrize(("parts", "whole"), [({"sites": "z", "heads": "all"}, "attn"), ({"sites": "neuron"}, "mlp")])
def test_all_parts_at_once_are_the_whole_write(parts, whole, model):
    """All that the last projection of a branch reads is all that it writes."""
    some, all_of_it = (patched(model, positions="each", **each).metric for each in (parts, {"sites": whole}))
    assert np.nanmax(np.abs(some.values - all_of_it.values)) < 1e-6
    assert np.nanmax(np.abs(some - patched(model).corrupted).values) > 1e-3


def test_one_of_all_parts_is_not_the_whole_write(model):
    """The twin of the test above."""
    some, whole = patched(model, sites="z", heads=[0]).metric, patched(model, sites="attn").metric
    assert np.nanmax(np.abs(some.values[:, :, :, 0] - whole.values)) > 1e-3


# 16: padding


@pytest.mark.parametrize("side", ["right", "left"])
def test_pairs_of_unequal_length_are_their_single_runs(side, smollm2, monkeypatch):
    """Whichever side the tokenizer would pad; each pair ends where it ends."""
    monkeypatch.setattr(smollm2.tokenizer, "padding_side", side)
    metric, layers = rs.logit_diff(" Mary", " John"), [14, 29]
    pairs = [(text.format("John"), text.format("Mary")) for text in (STORE, PARK, HOUSE)]
    clean, corrupted = map(list, zip(*pairs, strict=True))
    both = patched(smollm2, clean, corrupted, metric, layers=layers)
    assert len(set(both.length.values)) == 3
    mary, john = (smollm2.tokenizer(name)["input_ids"][0] for name in (" Mary", " John"))
    for row, pair in enumerate(pairs):
        alone = patched(smollm2, *pair, metric, layers=layers)
        length = int(both.length[row])
        assert np.abs(both.metric[row, ..., :length].values - alone.metric[0].values).max() < 1e-4
        assert both.metric[row, ..., length:].isnull().all()
        with torch.no_grad():
            last = smollm2.hf_model(**smollm2.tokenizer(pair[0], return_tensors="pt")).logits[0, -1]
        assert abs(float(both.clean[row]) - float(last[mary] - last[john])) < 1e-4


# 17: gates


def gate_net(gate):
    """Token 0 sets a bit that two branches each copy to an entry of their own; a branch above joins the copies."""
    entries = torch.eye(WIDTH, dtype=torch.float64)
    net = ToyModel(
        [
            (lambda x: x[..., :1] * entries[1], lambda x: x[..., :1] * entries[2]),
            (torch.zeros_like, lambda x: gate(x[..., 1:2], x[..., 2:3]) * entries[3]),
        ]
    )
    net.embedding, net.head = torch.zeros_like(net.embedding), torch.zeros_like(net.head)
    net.embedding[0, 0] = net.head[3, 0] = 1.0
    return net


AND, OR = (lambda a, b: torch.relu(a + b - 1)), (lambda a, b: 1 - torch.relu(1 - a - b))
THEORY = [(AND, "denoise", 0), (AND, "noise", 1), (OR, "denoise", 1), (OR, "noise", 0)]


@pytest.mark.parametrize(("gate", "direction", "effect"), THEORY, ids=["and", "and, noised", "or", "or, noised"])
def test_gates_tell_the_directions_apart(gate, direction, effect):
    """One input alone neither restores an AND nor breaks an OR; it breaks an AND, and restores an OR."""
    net, ids = gate_net(gate), torch.tensor([[0]])
    result = rs.patch_activations(
        net, ids, ids + 1, rs.logit_diff(0, 1), sites=["attn", "mlp"], layers=0, direction=direction
    )
    assert (result.data.effect == effect).all()
    assert result.settings["direction"] == direction
    assert ("restores" if direction == "denoise" else "removes") in result.settings["sign"]
    last = rs.patch_activations(net, ids, ids + 1, rs.logit_diff(0, 1), sites="mlp", layers=1, direction=direction)
    assert result.headline.startswith(direction)
    assert (last.data.effect == 1).all(), "what the gate writes is the whole answer"


# 20: memory


def test_two_hundred_runs_leave_nothing_behind(llama):
    """As many live tensors after 240 patched runs as after 24; results hold plain arrays of the size asked for."""

    def live():
        gc.collect()
        return sum(1 for each in gc.get_objects() if issubclass(type(each), torch.Tensor))

    counts = []
    for number in range(20):
        data = patched(llama, CLEAN[0], CORRUPTED[0], rs.logit_diff(4, 7), sites=("v", "z")[number % 2], positions=[-1])
        if number in (1, 9, 19):
            counts.append(live())
    assert counts == [counts[0]] * 3
    cells = {"prompt": 1, "site": 1, "layer": LAYERS, "head": 4, "position": 1}
    assert data.metric.sizes == cells
    assert all(type(values.values) is np.ndarray for values in data.values())
    assert data.metric.nbytes == data.effect.nbytes == 8 * np.prod(list(cells.values()))


# 22: places by name


def test_a_word_of_two_tokens_is_patched_as_one(smollm2):
    """Both tokens of " Eiffel", found by their characters, against a hook that puts both in."""
    hf_model, layer = smollm2.hf_model, 5
    clean, corrupted = (smollm2.tokenize(prompt).ids for prompt in PARIS)
    paris = smollm2.tokenizer(" Paris")["input_ids"][0]
    data = patched(smollm2, *PARIS, rs.log_prob(" Paris"), positions=[" Eiffel", " Tower"], layers=layer)
    assert data.token.values.tolist() == [[" Eiffel", " Tower"]]
    assert data.corrupted_token.values.tolist() == [[" Louvre", " Museum"]]
    for column, places in enumerate(([1, 2], [3])):
        seen = []

        def splice(output, places=places, seen=seen):
            output = output.clone()
            output[:, places] = seen[0][:, places]
            return output

        block = blocks_of(hf_model)[layer - 1]
        with torch.no_grad():
            with hooked(block, seen.append):
                hf_model(input_ids=clean)
            with hooked(block, splice):
                last = hf_model(input_ids=corrupted).logits[0, -1].log_softmax(-1)
        assert abs(float(data.metric[0, 0, 0, column]) - float(last[paris])) < 1e-4


def test_a_place_that_is_not_clear(smollm2):
    with pytest.raises(PromptError, match=r"' John' stands 2 times in prompt 0, at tokens \[\[3\], \[9\]\]"):
        patched(smollm2, STORE.format("John"), STORE.format("Mary"), rs.log_prob(" Mary"), positions=[" John"])
    with pytest.raises(PromptError, match=r"no ' eiffel' in prompt 0.*did you mean 'Eiffel'"):
        patched(smollm2, *PARIS, rs.log_prob(" Paris"), positions=" eiffel")


def test_a_prompt_that_ends_in_a_space(smollm2):
    with pytest.warns(UserWarning, match="prompt 0 ends in a space"):
        patched(smollm2, *(f"{prompt} " for prompt in PARIS), rs.log_prob(" Paris"), layers=29, positions=[-1])


# 25: order


@pytest.mark.parametrize("kind", ["resid_pre", "attn", "z", "k", "pattern", "neuron"])
def test_a_sweep_repeated_or_reordered_is_bit_equal(kind, name, model):
    """Alone in a fresh model, after another sweep, and with layers and positions in another order."""
    fresh = rs.load(SUPPORTED[name](), name=name, tokenizer=tokenizer())
    alone = patched(fresh, sites=kind)
    patched(model, CORRUPTED, CLEAN, rs.loss(), sites="mlp", direction="noise")
    assert alike(patched(model, sites=kind), alone)
    layers, positions = list(range(LAYERS)), [0, 1, 2]
    forth = patched(model, sites=kind, layers=layers, positions=positions).metric
    back = patched(model, sites=kind, layers=layers[::-1], positions=positions[::-1]).metric
    assert alike(back.sel(layer=layers, position=positions), forth)
