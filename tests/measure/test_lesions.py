"""Lesions against Hugging Face blocks called by hand in that order, a linear net, and the bootstrap's own promises."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, permutations

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import xarray as xr
from matplotlib.collections import FillBetweenPolyCollection
from matplotlib.figure import Figure
from models.test_trunk import logits_after, plant
from scipy.stats import kendalltau
from stream.test_read import CLOSE, unchecked
from tiny import SUPPORTED, VOCAB, blocks_of, state_of, tokenizer

import resstream as rs
from resstream.check import Check
from resstream.errors import EditError, MetricError, PromptError, ResultError, SiteError
from resstream.measure import lesions
from resstream.measure.removals import orders
from resstream.measure.removals.orders import KINDS
from resstream.models.causal_lm import CausalTrunk
from resstream.models.trunk import ResidualModel, Trunk
from resstream.plots import save_picture

DEPTH = 5
# Windows of 8 positions in every layer (mistral) or in every other one (gemma2), so two prompts are longer than that.
PROMPTS = [
    "w1 w2 w3 w4 w5 w6 w7 w8 w9 w1 w3 w5 w7 w9 w2 w4 w6 w8",
    "w9 w8 w7 w9 w8 w7 w3 w1 w4 w1 w5 w9 w2",
    "w3 w1",
]
LENGTHS = [18, 13, 2]
SIZES = {"gpt2": "n_layer", "gptj": "n_layer"}
NAMES = ("gpt2", "gptj", "llama", "mistral", "gemma2", "gemma3", "neox_parallel")
COUNTS = {"shuffle": [0, 1, 3], "swap": [0, 2, 3]}
DRAWN = ("delete", "shuffle", "scramble")
RANKED = ("shuffle", "swap", "scramble", "reverse")
every_how = pytest.mark.parametrize("how", KINDS)


def build(name):
    """A tiny model of five layers; of Gemma 3's, two have no window and another rotary table."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    more = {"layer_types": kinds} if name == "gemma3" else {}
    return SUPPORTED[name](**{SIZES.get(name, "num_hidden_layers"): DEPTH}, **more)


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def hf_model(name):
    return build(name)


@pytest.fixture(scope="module")
def model(name, hf_model):
    return rs.load(hf_model, name=name, tokenizer=tokenizer())


@pytest.fixture(scope="module")
def toy():
    return rs.load(build("llama"), name="toy", tokenizer=tokenizer())


def curve(model, how, **options):
    """A small curve of every prompt."""
    return rs.lesion_curve(
        model, PROMPTS, how=how, **{"counts": COUNTS.get(how, [0, 1, 3, 5]), "samples": 3, **options}
    )


# Orders


def brute_force_tau(ranks):
    """Kendall's tau by looking at every pair."""
    pairs = [(i, j) for j in range(len(ranks)) for i in range(j)]
    return sum(1 if ranks[i] < ranks[j] else -1 for i, j in pairs) / len(pairs)


def is_kendall_tau(function):
    """Whether a function is Kendall's tau on all permutations of five, and on a long one."""
    rng = np.random.default_rng(0)
    ranks = [*permutations(range(5)), rng.permutation(30).tolist()]
    return all(
        function(each) == pytest.approx(brute_force_tau(each), abs=1e-12)
        and function(each) == pytest.approx(kendalltau(range(len(each)), each).statistic, abs=1e-12)
        for each in ranks
    )


def test_kendall_tau_is_what_every_pair_says():
    assert is_kendall_tau(orders.kendall_tau)
    assert orders.kendall_tau([0]) == 1.0


def test_another_rank_correlation_would_be_noticed():
    """The twin of the test above: Spearman's, and one that forgets a pair."""
    assert not is_kendall_tau(lambda ranks: float(np.corrcoef(range(len(ranks)), ranks)[0, 1]))
    assert not is_kendall_tau(lambda ranks: float(np.mean([np.sign(b - a) for a, b in pairwise(ranks)])))


def window_by_hand(n, size):
    """The middle of a stack, by taking its ends off in turn, the upper one first."""
    left = list(range(n))
    while len(left) > size:
        left.pop(-1 if (n - len(left)) % 2 == 0 else 0)
    return left


def control_by_hand(how, n, count, order):
    """What runs in the control of a lesion."""
    if how == "shuffle":
        return [place for place, (layer,) in enumerate(order) if layer == place]
    gone = {count, count + 1} if how == "swap" else window_by_hand(n, count)
    return [layer for layer in range(n) if layer not in gone]


def lesions_of(how, n, counts, seed=0):
    return dict(zip(counts, KINDS[how].make(n, counts, np.random.default_rng(seed)), strict=True))


@every_how
@pytest.mark.parametrize("n", [1, 2, 3, 6, 7, 30, 60, 81])
def test_the_counts_of_a_lesion_are_some_that_it_allows(how, n):
    default = list(KINDS[how].default(n))
    assert default == sorted(set(default))
    assert set(default) <= set(KINDS[how].allowed(n))
    assert how == "swap" or (default[0] == 0 and len(default) <= 18)
    assert default or (how == "swap" and n == 1)


@every_how
@pytest.mark.parametrize("n", [2, 3, 6, 7, 30])
def test_what_each_lesion_does_to_the_order(how, n):
    counts = list(KINDS[how].allowed(n))[:40]
    for count, lesion in lesions_of(how, n, counts).items():
        flat = [layer for step in lesion.order for layer in step]
        window = window_by_hand(n, count) if how not in ("shuffle", "swap") else []
        low, high = (window[0], window[-1] + 1) if window else (n // 2, n // 2)
        if how == "delete":
            assert len(flat) == n - count
            assert flat == sorted(set(flat))
        elif how == "repeat":
            assert flat == [*range(low), *[(n - 1) // 2] * count, *range(high, n)]
        else:
            assert sorted(flat) == list(range(n))
        if how == "swap":
            assert flat == [*range(count), count + 1, count, *range(count + 2, n)]
        if how == "reverse":
            assert flat == [*range(low), *window[::-1], *range(high, n)]
        if how == "scramble":
            assert flat[:low] + flat[high:] == [*range(low), *range(high, n)]
        if how == "parallel":
            assert lesion.order == (
                *((i,) for i in range(low)),
                *[tuple(window)][:count],
                *((i,) for i in range(high, n)),
            )
        elif how != "delete":
            assert {len(step) for step in lesion.order} <= {1}
        assert [layer for step in lesion.control for layer in step] == control_by_hand(how, n, count, lesion.order)
        for order in [lesion.control, *([lesion.order] if how == "delete" else [])]:
            # What is deleted leaves its place behind.
            assert tuple(step or (place,) for place, step in enumerate(order)) == orders.whole(n)


@pytest.mark.parametrize("how", [how for how in KINDS if how not in ("shuffle", "swap", "delete")])
@pytest.mark.parametrize("n", [5, 6])
def test_the_ends_run_in_their_place_until_the_window_reaches_them(how, n):
    for count, lesion in lesions_of(how, n, range(n - 1)).items():
        assert (lesion.order[0], lesion.order[-1]) == ((0,), (n - 1,)), count


@every_how
def test_nothing_done_is_the_models_own_order(how):
    if how != "swap":
        assert lesions_of(how, 6, [0])[0] == orders.Lesion(orders.whole(6), orders.whole(6))
    if KINDS[how].counted.startswith("middle"):
        assert lesions_of(how, 6, [1])[1].order == orders.whole(6)


def test_a_larger_count_goes_on_where_a_smaller_one_ended():
    kept = [{*lesion.order} - {()} for lesion in lesions_of("delete", 12, range(13)).values()]
    assert all(fewer < more for more, fewer in pairwise(kept))
    shuffled = lesions_of("shuffle", 12, range(20))
    for count in range(19):
        pairs = zip(shuffled[count].order, shuffled[count + 1].order, strict=True)
        assert sum(before != after for before, after in pairs) == 2, "one transposition, of two different places"
    scrambled = lesions_of("scramble", 12, range(13))
    for count in range(12):
        inner = [layer for (layer,) in scrambled[count].order if layer in orders.middle(12, count)]
        assert inner == [layer for (layer,) in scrambled[count + 1].order if layer in orders.middle(12, count)]
    assert lesions_of("shuffle", 12, [4, 9])[9] == shuffled[9], "whatever else is asked for"


def test_draws_are_uniform():
    draws = [lesions_of("delete", 6, [2], seed)[2].order for seed in range(3000)]
    counts = np.unique([str(draw) for draw in draws], return_counts=True)[1]
    assert len(counts) == 15
    assert abs(counts / 3000 - 1 / 15).max() < 0.02
    firsts = [lesions_of("shuffle", 4, [1], seed)[1].order for seed in range(3000)]
    counts = np.unique([str(draw) for draw in firsts], return_counts=True)[1]
    assert len(counts) == 6
    assert abs(counts / 3000 - 1 / 6).max() < 0.03


# Against blocks called by hand


def recorded(hf_model, ids):
    """What the model's own forward calls each block with, and the logits that it gives."""
    calls = []
    look = [
        block.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
        for block in blocks_of(hf_model)
    ]
    try:
        logits = hf_model(input_ids=ids, use_cache=False).logits[0]
    finally:
        for handle in look:
            handle.remove()
    return calls, logits


def run_by_hand(hf_model, ids, order, *, by_slot=False):
    """The logits of one prompt when the blocks run in some order; brackets read the same stream.

    Each block is called as the model called it, in its own slot: with its own mask, window and rotary table. The other
    way, by the slot in which it now stands, is what a plain change of the module list would do.
    """
    calls, _ = recorded(hf_model, ids)
    x = calls[0][0][0] if calls[0][0] else calls[0][1]["hidden_states"]

    def block(layer, x, slot):
        args, kwargs = calls[slot if by_slot else layer]
        args, kwargs = ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})
        output = blocks_of(hf_model)[layer](*args, **kwargs)
        return output if isinstance(output, torch.Tensor) else output[0]

    for slot, step in enumerate(order):
        x = x + sum(block(layer, x, slot) - x for layer in step)
    return logits_after(hf_model, ids, x)[0]


def parsed(text):
    """The steps of an order as a result spells it."""
    return [tuple(map(int, each.strip("()").split())) for each in re.findall(r"\([^)]*\)|\d+", text)]


def statistics_by_hand(logits, base, ids):
    """Loss, KL and agreement, in float64."""
    log_probs, before = logits.double().log_softmax(-1), base.double().log_softmax(-1)
    loss = -torch.stack([log_probs[place, ids[place + 1]] for place in range(len(ids) - 1)]).mean()
    kl = (before.exp() * (before - log_probs)).sum(-1).mean()
    return float(loss), float(kl), float((log_probs.argmax(-1) == before.argmax(-1)).double().mean())


def equals_blocks_by_hand(model, hf_model, how, by_slot=False):
    """Assert that every number of a curve is that of blocks called by hand, one prompt at a time, without padding."""
    data = curve(model, how, samples=2).data
    expected = {name: np.empty(data[name].shape) for name in ("loss", "kl", "top1")}
    expected |= {f"{name}_control": np.empty(data[name].shape) for name in ("loss", "kl", "top1")}
    base = np.empty(len(PROMPTS))
    with torch.no_grad():
        for row, prompt in enumerate(PROMPTS):
            ids = model.tokenize(prompt).ids
            _, own = recorded(hf_model, ids)
            base[row] = statistics_by_hand(own, own, ids[0])[0]
            for place in np.ndindex(data.loss.shape[1:]):
                order = parsed(str(data.order.values[place]))
                control = control_by_hand(how, DEPTH, int(data.lesion[place[0]]), order)
                if how == "delete":
                    assert len(order) == DEPTH - int(data.lesion[place[0]])
                for ending, steps in (("", order), ("_control", [(layer,) for layer in control])):
                    found = run_by_hand(hf_model, ids, steps, by_slot=by_slot)
                    for name, value in zip(("loss", "kl", "top1"), statistics_by_hand(found, own, ids[0]), strict=True):
                        expected[name + ending][(row, *place)] = value
    assert np.abs(data.base_loss.values - base).max() < 2 * CLOSE * base.max()
    for name, values in expected.items():
        assert np.abs(data[name].values - values).max() < 10 * CLOSE * values.max(), name
    assert np.abs(data.kl.values[:, -1]).min() > 1e-3, "and the largest lesion is felt"


@every_how
def test_a_lesion_is_the_blocks_called_by_hand_in_that_order(how, model, hf_model):
    equals_blocks_by_hand(model, hf_model, how)


@pytest.mark.parametrize("how", ["delete", "shuffle", "parallel"])
def test_a_block_that_is_off_is_noticed(how, model, hf_model, monkeypatch):
    """The twin of the test above."""
    plant(monkeypatch, CausalTrunk, "layer")
    with pytest.raises(AssertionError):
        equals_blocks_by_hand(model, hf_model, how)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"], indirect=True)
def test_windows_that_stay_with_the_slot_would_be_noticed(name, model, hf_model):
    """Another twin: in these, layers differ in their windows or rotary tables."""
    with pytest.raises(AssertionError):
        equals_blocks_by_hand(model, hf_model, "shuffle", by_slot=True)


@pytest.mark.parametrize("name", ["llama", "gemma2"], indirect=True)
def test_writes_are_lesioned_as_edits_would(name, model):
    sites = model.writes
    result = rs.lesion_curve(model, PROMPTS[0], how="delete", unit="write", counts=[0, 1, 4], samples=4)
    ids = model.tokenize(PROMPTS[0]).ids[0]
    for place in np.ndindex(result.data.loss.shape[1:]):
        kept = [unit for (unit,) in parsed(str(result.data.order.values[place]))]
        gone = [rs.Skip(site) for unit, site in enumerate(sites) if unit not in kept]
        with torch.no_grad(), rs.edited(model, *gone) as edited:
            expected = statistics_by_hand(edited.logits(PROMPTS[0])[0], model.logits(PROMPTS[0])[0], ids)
        found = [float(result.data[name].values[(0, *place)]) for name in ("loss", "kl", "top1")]
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("name", ["llama"], indirect=True)
@pytest.mark.parametrize("how", ["swap", "parallel"])
def test_writes_take_each_others_place(name, how, model):
    """The attention and the MLP write of layer 2, swapped or side by side, with no help from the library's own runs."""
    count = {"swap": 4, "parallel": 2}[how]
    found = rs.lesion_curve(model, PROMPTS[0], how=how, unit="write", counts=[count]).data
    with torch.no_grad():
        tokens = model.tokenize(PROMPTS[0])
        trunk = model.trunk(tokens)
        x = trunk.x0
        for layer in range(DEPTH):
            attn, mlp = (model.site(f"{layer}.{kind}") for kind in ("attn", "mlp"))
            if layer != 2:
                x = trunk.layer(layer, x)
            elif how == "swap":
                x = x + trunk.write(mlp, x)
                x = x + trunk.write(attn, x)
            else:
                x = x + trunk.write(mlp, x) + trunk.write(attn, x)
        expected = statistics_by_hand(model.readout(x)[0], model.logits(tokens)[0], tokens.ids[0])
    assert found.order.item() in ("0 1 2 3 5 4 6 7 8 9", "0 1 2 3 (4 5) 6 7 8 9")
    assert [found[name].item() for name in ("loss", "kl", "top1")] == pytest.approx(expected, rel=1e-4)


# A linear net, whose answers are products of matrices


class Linear(ResidualModel):
    """Layers x <- x + W x on a stream of one-hot tokens, read out as it is: every lesion is a product of matrices."""

    def __init__(self, depth=6, width=7):
        rng = np.random.default_rng(0)
        self.weights = torch.from_numpy(rng.normal(size=(depth, width, width)) * 0.2)
        self.embedding = torch.from_numpy(rng.normal(size=(width, width)))
        self.name, self.n_layers, self.d_model, self.n_heads, self.vocab_size = "linear", depth, width, 1, width
        self.max_positions, self.layout, self.tokenizer, self.hf_model = None, "sequential", None, None
        self.check = self.verify()

    def trunk(self, tokens):
        return LinearTrunk(self, tokens)

    def readout(self, x, vocab=None):
        return x if vocab is None else x[..., list(vocab)]

    def own_logits(self, tokens):
        return self.readout(self.trunk(tokens).run())

    def verify(self):
        return Check("linear", 0.0, 1e-10)

    def in_float64(self):
        return self

    device, dtype = torch.device("cpu"), torch.float64


class LinearTrunk(Trunk):
    """The stream of a linear net; its attention writes nothing."""

    def __init__(self, model, tokens):
        self.model, self.tokens, self.order = model, tokens, range(model.n_layers)
        self.x0 = model.embedding[tokens.ids]

    def layer(self, layer, x):
        return x + x @ self.model.weights[layer].T

    def write(self, site, x):
        return x @ self.model.weights[site.layer].T if site.kind == "mlp" else torch.zeros_like(x)


IDS = torch.tensor([[0, 3, 1, 6, 2]])


def factor(net, step):
    """The matrix of one step of an order."""
    return torch.eye(net.d_model, dtype=torch.float64) + sum(net.weights[layer] for layer in step)


@every_how
def test_on_a_linear_net_a_lesion_is_a_product_of_factors(how):
    net = Linear()
    data = rs.lesion_curve(net, IDS, how=how, counts=COUNTS.get(how, [0, 2, 4, 6]), samples=4).data
    own = net.own_logits(net.tokenize(IDS))[0]
    for place in np.ndindex(data.loss.shape[1:]):
        product = torch.eye(net.d_model, dtype=torch.float64)
        for step in parsed(str(data.order.values[place])):
            product = factor(net, step) @ product
        logits = (product @ net.embedding[IDS[0]].T).T
        expected = statistics_by_hand(logits, own, IDS[0])
        found = [float(data[name].values[(0, *place)]) for name in ("loss", "kl", "top1")]
        assert found == pytest.approx(expected, abs=1e-12)


def test_deleting_a_layer_of_a_linear_net_removes_the_paths_through_it_and_no_others():
    """Half of all paths for each layer that is deleted."""
    net = Linear(depth=3)
    found = rs.lesion_curve(net, IDS, how="delete", counts=[1], samples=8).data
    for sample in range(8):
        kept = {unit for (unit,) in parsed(str(found.order.values[0, sample]))}
        total = torch.zeros(net.d_model, net.d_model, dtype=torch.float64)
        paths = [path for path in np.ndindex(2, 2, 2) if all(unit in kept for unit in range(3) if path[unit])]
        for path in paths:
            product = torch.eye(net.d_model, dtype=torch.float64)
            for unit in range(3):
                product = net.weights[unit] @ product if path[unit] else product
            total += product
        logits = (total @ net.embedding[IDS[0]].T).T
        assert len(paths) == 4
        assert found.loss.values[0, 0, sample] == pytest.approx(
            statistics_by_hand(logits, logits, IDS[0])[0], abs=1e-12
        )


# The base run


@pytest.mark.parametrize("how", [how for how in KINDS if how != "swap"])
def test_nothing_lesioned_is_the_base_run_exactly(how, model):
    result = curve(model, how)
    nothing = result.data.sel(lesion=0)
    assert np.array_equal(nothing.loss, np.broadcast_to(result.data.base_loss.values[:, None], nothing.loss.shape))
    for name, value in {"effect": 0.0, "kl": 0.0, "top1": 1.0}.items():
        assert (nothing[name] == value).all(), name
        assert (nothing[f"{name}_control"] == value).all(), name
    assert result.check.passed
    assert result.check.error < CLOSE


def test_a_base_run_that_is_off_fails_the_check(toy, monkeypatch):
    plant(monkeypatch, CausalTrunk, "layer")
    result = curve(toy, "reverse")
    assert not result.check.passed
    assert "FAILED" in repr(result)


@pytest.mark.parametrize("name", ["gpt2", "gemma2"], indirect=True)
@pytest.mark.parametrize("how", ["delete", "parallel"])
def test_prompts_together_are_prompts_alone(name, how, model):
    together = curve(model, how).data
    for row, prompt in enumerate(PROMPTS):
        alone = rs.lesion_curve(model, prompt, how=how, counts=[0, 1, 3, 5], samples=3).data
        for name in ("loss", "kl", "top1", "loss_control"):
            assert together[name].values[row] == pytest.approx(alone[name].values[0], rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("budget", [1, 40, 130])
def test_chunks_change_nothing(budget, toy, monkeypatch):
    whole = curve(toy, "shuffle").data
    monkeypatch.setattr(lesions, "TOKENS_PER_CHUNK", budget)
    with counted(toy) as widths:
        parts = curve(toy, "shuffle").data
    assert max(widths) <= max(1, budget // max(LENGTHS))
    for name in ("loss", "kl", "top1", "loss_control"):
        assert parts[name].values == pytest.approx(whole[name].values, rel=1e-4, abs=1e-7)


@contextmanager
def counted(model):
    """How many rows each call of a block has, by hooks."""
    rows = []

    def note(_, args, kwargs):
        rows.append(len(args[0] if args else kwargs["hidden_states"]))

    handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks_of(model.hf_model)]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


def test_nothing_below_the_first_change_is_run_again_and_no_order_twice(toy):
    with counted(toy) as base:
        rs.lesion_curve(toy, PROMPTS[0], counts=0)
    with counted(toy) as swapped:
        rs.lesion_curve(toy, PROMPTS[0], how="swap", counts=3)
    assert sum(swapped) - sum(base) == 2, "the last two layers; the control, which ends before them, runs nothing"
    with counted(toy) as deleted:
        rs.lesion_curve(toy, PROMPTS[0], how="delete", counts=[0, DEPTH], samples=50)
    assert deleted == base, "one way to delete none and one to delete all, neither of which runs a layer"


def test_orders_that_only_leave_layers_out_run_each_layer_once(toy):
    with counted(toy) as base:
        rs.lesion_curve(toy, PROMPTS[0], counts=0)
    with counted(toy) as deleted:
        rs.lesion_curve(toy, PROMPTS[0], counts=[1, 2, 3], samples=30)
    assert len(deleted) - len(base) <= DEPTH


@every_how
def test_ranks_are_given_where_all_layers_run(how, toy):
    data = curve(toy, how).data
    assert ("kendall_tau" in data) == (how in RANKED)
    if how in RANKED:
        for place in np.ndindex(data.kendall_tau.shape):
            ranks = [layer for (layer,) in parsed(str(data.order.values[place]))]
            assert data.kendall_tau.values[place] == pytest.approx(brute_force_tau(ranks))


def test_a_curve_of_half_precision_is_measured_in_full(monkeypatch):
    half = rs.load(build("llama").to(torch.bfloat16), name="half", tokenizer=tokenizer())
    result = curve(half, "reverse")
    assert result.check.passed
    assert (result.data.kl.sel(lesion=0) == 0).all()
    losses = torch.from_numpy(result.data.loss.values)
    assert (losses.bfloat16().double() != losses).any()


# Means, intervals and draws


@every_how
def test_the_samples_are_kept_and_averaged(how, toy):
    data = curve(toy, how).data
    assert data.sizes["sample"] == (3 if how in DRAWN else 1)
    assert data.loss.dims == data.loss_control.dims == ("prompt", "lesion", "sample")
    for name in ("loss", "effect", "kl", "top1"):
        for ending in (name, f"{name}_control"):
            mean, low, high = (data[f"{ending}_{end}"].values for end in ("mean", "low", "high"))
            assert mean == pytest.approx(data[ending].values.mean(axis=(0, 2)))
            assert ((low <= mean + 1e-12) & (mean <= high + 1e-12)).all()
    assert data.effect.values == pytest.approx(data.loss.values - data.base_loss.values[:, None, None])


def synthetic(prompts, samples, rng, noise=1.0):
    """Draws of a curve whose true mean is 3: every prompt and every draw has its own part."""
    own = rng.normal(size=(prompts, 1, 1)) * (prompts > 1) + noise * rng.normal(size=(1, 1, samples))
    return xr.Dataset({"loss": (("prompt", "lesion", "sample"), 3.0 + np.tile(own, (1, 2, 1)))})


def coverage(prompts, samples, interval, repeats=200):
    """How often the interval holds the true mean."""
    rng = np.random.default_rng(1)
    held = 0
    for seed in range(repeats):
        low, high = interval(synthetic(prompts, samples, rng), seed)
        held += low <= 3.0 <= high
    return held / repeats


def bootstrap(data, seed):
    found, _ = lesions._with_intervals(data, KINDS["delete"], seed)
    return float(found.loss_low[0]), float(found.loss_high[0])


@pytest.mark.parametrize(("prompts", "samples"), [(1, 40), (25, 25)])
def test_the_interval_holds_the_mean_as_often_as_it_says(prompts, samples, monkeypatch):
    monkeypatch.setattr(lesions, "RESAMPLES", 500)
    assert 0.89 <= coverage(prompts, samples, bootstrap) <= 0.99


def test_an_interval_that_forgot_a_source_of_noise_would_be_noticed(monkeypatch):
    """The twin of the test above: averaging the prompts first leaves only the draws to resample."""
    monkeypatch.setattr(lesions, "RESAMPLES", 500)

    def narrow(data, seed):
        return bootstrap(data.mean("prompt", keepdims=True), seed)

    assert coverage(25, 25, narrow) < 0.85


def test_an_interval_says_what_it_is_over(toy):
    assert curve(toy, "delete").settings["interval"] == "samples and prompts"
    assert curve(toy, "reverse").settings["interval"] == "prompts"
    one = rs.lesion_curve(toy, PROMPTS[0], how="shuffle", counts=[1, 2], samples=4)
    assert one.settings["interval"] == "samples"
    alone = rs.lesion_curve(toy, PROMPTS[0], how="reverse", counts=[3])
    assert alone.settings["interval"] == "nothing"
    assert (alone.data.loss_low == alone.data.loss_high).all()


def test_one_draw_does_not_say_how_far_draws_are_apart(toy):
    data = curve(toy, "delete", samples=1).data
    assert data.loss_low.isnull().all()
    assert data.loss_high.isnull().all()
    assert data.loss_mean.notnull().all()


@pytest.mark.parametrize("how", DRAWN)
def test_draws_follow_the_seed_alone(how, toy):
    first, again, other = curve(toy, how), curve(toy, how), curve(toy, how, seed=1)
    assert first.data.identical(again.data)
    assert not np.array_equal(first.data.order, other.data.order)
    more = curve(toy, how, samples=5).data
    assert np.array_equal(more.order.isel(sample=slice(3)), first.data.order)
    fewer = curve(toy, how, counts=[3]).data
    assert np.array_equal(fewer.order.sel(lesion=3), first.data.order.sel(lesion=3))


@every_how
def test_nothing_is_left_behind(how, toy):
    before, numpy_before = state_of(toy.hf_model), np.random.get_state()[1].tolist()
    curve(toy, how)
    assert state_of(toy.hf_model) == before
    assert np.random.get_state()[1].tolist() == numpy_before


def test_gradients_are_not_kept(toy):
    with torch.enable_grad():
        curve(toy, "parallel")
    assert all(parameter.grad is None for parameter in toy.hf_model.parameters())


# What is refused


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"how": "burn"}, SiteError, "how=\"burn\" is not known; choose from 'delete', 'shuffle'"),
        ({"unit": "head"}, SiteError, "unit=\"head\" is not known; choose from 'layer', 'write'"),
        ({"counts": [0, 6]}, SiteError, 'how="delete" of toy with 5 layers has no count 6; give numbers from 0 to 5'),
        ({"counts": -1}, SiteError, "has no count -1; give numbers from 0 to 5, such as counts=[0, 5]"),
        ({"counts": [1.5]}, SiteError, "has no count 1.5"),
        ({"counts": ["1"]}, SiteError, "has no count '1'"),
        ({"counts": [True]}, SiteError, "has no count True"),
        ({"counts": []}, SiteError, "needs at least one count"),
        ({"how": "swap", "counts": [4]}, SiteError, "has no count 4; give numbers from 0 to 3"),
        ({"how": "shuffle", "counts": [11]}, SiteError, "has no count 11; give numbers from 0 to 10"),
        ({"samples": 0}, MetricError, "samples=0 draws no lesion; give 1 or more, such as samples=20"),
    ],
)
def test_what_cannot_be_lesioned_is_said(options, error, message, toy):
    with unchecked(), pytest.raises(error, match=re.escape(message)):
        rs.lesion_curve(toy, PROMPTS, **options)


def test_a_prompt_of_one_token_is_refused(toy):
    with pytest.raises(PromptError, match="prompt 1 has one token, 'w2', so no next token to take the loss of"):
        rs.lesion_curve(toy, ["w1 w2", "w2"])


def test_an_edited_model_is_refused(toy):
    with rs.edited(toy, rs.Skip(0)) as edited, pytest.raises(EditError, match=r"lesion_curve.*rs\.load"):
        rs.lesion_curve(edited, PROMPTS)


@pytest.mark.parametrize("name", ["neox_parallel"], indirect=True)
def test_writes_that_read_the_same_stream_have_no_order(name, model):
    with pytest.raises(SiteError, match=r'both writes of a layer read the same input.*use unit="layer"'):
        rs.lesion_curve(model, PROMPTS, unit="write")


def test_a_single_layer_has_no_neighbour():
    net = Linear(depth=1)
    with pytest.raises(SiteError, match='how="swap" needs two neighbours, and linear with 1 layers has none'):
        rs.lesion_curve(net, IDS, how="swap")
    for how in KINDS:
        if how != "swap":
            assert rs.lesion_curve(net, IDS, how=how, samples=2).check.passed


# The result and its picture


def test_a_result_is_kept_whole(toy, tmp_path):
    result = curve(toy, "shuffle")
    again = rs.open_result(result.save(tmp_path / "lesion.nc"))
    xr.testing.assert_identical(again.data, result.data)
    assert (again.headline, again.settings, again.check) == (result.headline, result.settings, result.check)
    assert len(again.to_dataframe()) == 3 * 3 * 3


def test_the_headline_says_what_was_lost(toy):
    assert re.match(
        r"layers deleted, of 5; 1: [+-][\d.]+ nats \[[+-][\d.]+, [+-][\d.]+\], top-1 kept \d+%; 3: ",
        curve(toy, "delete").headline,
    )
    alone = rs.lesion_curve(toy, PROMPTS[0], how="reverse", counts=[3])
    assert re.fullmatch(r"middle layers in reverse order, of 5; 3: [+-][\d.]+ nats, top-1 kept \d+%", alone.headline)
    swapped = curve(toy, "swap")
    worst = int(swapped.data.lesion[int(swapped.data.effect_mean.argmax("lesion"))])
    assert f"costliest {worst} (" in swapped.headline
    assert "writes deleted, of 10" in rs.lesion_curve(toy, PROMPTS[0], unit="write", counts=[2], samples=1).headline


@pytest.fixture
def ax():
    """Axes of a figure that pyplot never sees."""
    return Figure().add_subplot()


def bands(ax):
    return [each for each in ax.collections if isinstance(each, FillBetweenPolyCollection)]


def lines(ax):
    """The two curves, without points and marks."""
    return [line for line in ax.lines if line.get_linestyle() in ("-", "--") and line.get_marker() == "o"]


@every_how
@pytest.mark.parametrize("show", ["loss", "kl", "top1"])
def test_the_picture_shows_the_curve_and_its_control(how, show, toy, ax):
    result = curve(toy, how)
    assert result.plot(ax, show=show) is ax
    name = {"loss": "effect"}.get(show, show)
    lesion, control = lines(ax)
    assert np.array_equal(lesion.get_ydata(), result.data[f"{name}_mean"])
    assert np.array_equal(control.get_ydata(), result.data[f"{name}_control_mean"])
    x = result.data.kendall_tau.mean("sample") if how == "shuffle" else result.data.lesion
    assert np.array_equal(lesion.get_xdata(), x)
    assert (ax.get_xlim()[0] > ax.get_xlim()[1]) == (how == "shuffle")
    assert len(bands(ax)) == 2
    assert "toy, 5 layers" in ax.get_title(loc="left")
    assert ax.get_xlabel()
    assert "nats" in ax.get_ylabel() or show == "top1"
    low, high = ax.get_ylim()
    assert low <= result.data[f"{name}_low"].min()
    assert result.data[f"{name}_high"].max() <= high


def test_points_are_draws_or_else_prompts(toy, ax):
    drawn = curve(toy, "delete")
    drawn.plot(ax)
    (points,) = [line for line in ax.lines if line.get_linestyle() == "None"]
    assert np.array_equal(points.get_ydata(), drawn.data.effect.mean("prompt").values.ravel())
    assert "points: each draw; bands: 95% bootstrap over samples and prompts" in ax.get_title(loc="left")
    fixed, other = curve(toy, "reverse"), Figure().add_subplot()
    fixed.plot(other)
    (points,) = [line for line in other.lines if line.get_linestyle() == "None"]
    assert np.array_equal(points.get_ydata(), fixed.data.effect.values[:, :, 0].T.ravel())
    assert "points: each prompt" in other.get_title(loc="left")


def test_one_prompt_of_several_is_drawn_without_their_interval(toy, ax):
    result = curve(toy, "delete")
    result.plot(ax, prompt=1)
    assert np.array_equal(lines(ax)[0].get_ydata(), result.data.effect.values[1].mean(axis=1))
    assert not bands(ax)
    assert "prompt 1" in ax.get_title(loc="left")


def test_a_control_that_is_far_worse_does_not_flatten_the_curve(toy, ax):
    result = curve(toy, "reverse")
    data = result.data.assign(effect_control=result.data.effect_control + 1000.0)
    replace(result, data=data).plot(ax)
    assert ax.get_ylim()[1] < 100
    assert "(up to 1e+03)" in ax.get_legend().get_texts()[1].get_text()


def test_the_loss_of_a_guess_is_marked_where_it_is_near(toy, ax):
    result = curve(toy, "delete")
    guess = np.log(VOCAB) - float(result.data.base_loss.mean())
    shifted = replace(result, data=result.data.assign(base_loss=result.data.base_loss - 100.0))
    result.plot(ax)
    marks = [line.get_ydata()[0] for line in ax.lines if line.get_linestyle() == ":"]
    assert marks == ([pytest.approx(guess)] if guess < ax.get_ylim()[1] else [])
    shifted.plot(far := Figure().add_subplot())
    assert not [line for line in far.lines if line.get_linestyle() == ":"]


def test_a_picture_needs_no_pyplot_and_refuses_what_it_cannot_draw(toy, tmp_path, ax):
    result = curve(toy, "swap")
    save_picture(result, tmp_path / "lesion.png", dpi=40, show="kl")
    assert (tmp_path / "lesion.png").read_bytes().startswith(b"\x89PNG")
    assert not plt.get_fignums()
    with pytest.raises(ResultError, match=r"show='rank'.*'loss', 'kl', 'top1'"):
        result.plot(ax, show="rank")
    with pytest.raises(ResultError, match=r"no prompt 3.*prompts 0-2"):
        result.plot(ax, prompt=3)
    with pytest.raises(ResultError, match='needs the variable "effect"'):
        replace(result, data=result.data.drop_vars("effect")).plot(ax)
    failed = replace(result, check=Check("one side = the other", 1.0, 1e-5))
    assert "FAILED" in failed.plot(Figure().add_subplot()).get_title(loc="left").splitlines()[0]


# The embedded model


def test_the_middle_of_smollm2_can_run_out_of_order_and_its_first_layer_cannot(smollm2):
    """Neighbours swap at little cost, except the first; of the lesions of the middle, repeating is the worst."""
    text = "The Eiffel Tower is in the city of Paris, and it was built in 1889."
    swapped = rs.lesion_curve(smollm2, text, how="swap", counts=[0, 14]).data.effect_mean
    assert swapped.sel(lesion=0) > 5
    assert abs(swapped.sel(lesion=14)) < 0.5
    six = {
        how: rs.lesion_curve(smollm2, text, how=how, counts=[6]).data.effect_mean.item()
        for how in ("reverse", "parallel", "repeat")
    }
    assert six["parallel"] < six["reverse"] < six["repeat"]
