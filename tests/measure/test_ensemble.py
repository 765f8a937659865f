"""The layer ensemble against one plain run for each subset, on toy nets and on models with hooks."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from itertools import combinations
from math import comb

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from measure.test_ablation import METRIC, NAMES, PROMPTS, REFERENCE, difference, removal, writes_by_hand, zeros
from measure.test_paths import IDS, ToyModel, ToyTrunk, random_parts, through
from models.test_trunk import plant
from stream.test_read import ARCHITECTURES, Planted, by_hooks, says, unchecked
from tiny import LAYERS, blocks_of, state_of, tokenizer

import resstream as rs
from resstream.errors import EditError, MetricError, PromptError, ResultError, SiteError
from resstream.measure import ensemble
from resstream.measure.removals import subsets
from resstream.measure.removals.removal import Tree
from resstream.models.causal_lm import CausalLM, CausalTrunk

EXACT = 1e-10  # float64
CLOSE = 3e-6  # logits of the tiny models, which are some 0.5
TOY_METRIC = rs.logit_diff(0, 1)


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
def tiny():
    return rs.load(ARCHITECTURES["llama"](), name="tiny", tokenizer=tokenizer())


class LinearToy(ToyModel):
    """A toy whose logits are linear in the last state, so that the whole net is linear if its branches are."""

    def readout(self, x, vocab=None):
        return x @ self.head if vocab is None else (x @ self.head)[..., list(vocab)]


def toy(layers=10, kind="tanh", layout="sequential", seed=0):
    return ToyModel(random_parts(layers, kind, seed=seed), layout=layout, seed=seed)


# Every subset, on toy nets


def run_by_hand(model, kept):
    """The metric of a toy of which only some writes are kept, named "3.attn"."""
    x = model.embedding[IDS]
    for layer, (attn, mlp) in enumerate(model.branches):
        writes = [
            part if f"{layer}.{kind}" in kept else torch.zeros_like for part, kind in ((attn, "attn"), (mlp, "mlp"))
        ]
        x = through(model, writes, x)
    logits = model.readout(x)[0, -1]
    return float(logits[0] - logits[1])


def by_loop(model, unit, units):
    """The metric of every subset of some units, one run each; all else is kept."""
    values = []
    for number in range(2 ** len(units)):
        gone = {each for place, each in enumerate(units) if not number >> place & 1}
        kept = {
            site
            for site in model.writes
            if site not in gone and not (unit == "layer" and int(site.split(".")[0]) in gone)
        }
        values.append(run_by_hand(model, kept))
    return np.array(values)


CASES = {
    "ten layers": (lambda: toy(), "layer", range(10)),
    "ten parallel layers": (lambda: toy(layout="parallel"), "layer", range(10)),
    "ten writes": (lambda: toy(5), "write", None),
    "ten parallel writes": (lambda: toy(5, layout="parallel"), "write", None),
    "some layers": (lambda: toy(6), "layer", [2, 4, 5]),
    "some writes": (lambda: toy(6), "write", ["1.mlp", "3.attn", "3.mlp", "4.attn"]),
    "some parallel writes": (lambda: toy(6, layout="parallel"), "write", ["1.mlp", "3.attn", "3.mlp", "4.attn"]),
    "one write": (lambda: toy(3), "write", ["2.mlp"]),
}


def every_subset_is_its_run(case):
    make, unit, units = CASES[case]
    model = make()
    chosen = list(model.writes if units is None else units)
    result = rs.layer_ensemble(model, IDS, TOY_METRIC, unit=unit, units=units)
    values = by_loop(model, unit, chosen)
    data = result.data.isel(prompt=0)
    assert np.abs(data.value.values - values).max() < EXACT
    assert data.unit.values.tolist() == data.unit_2.values.tolist() == [str(each) for each in chosen]
    assert np.abs(data.shapley.values - subsets.shapley(values)).max() < EXACT
    assert float(data.shapley.sum()) == pytest.approx(values[-1] - values[0], abs=EXACT)
    assert float(data.term.sum()) == pytest.approx(values[-1], abs=EXACT)
    assert float(data.order_total.sum()) == pytest.approx(values[-1], abs=EXACT)
    assert float(data.base) == pytest.approx(values[-1], abs=EXACT)
    for level in range(len(chosen) + 1):
        of_size = [sum(2**place for place in some) for some in combinations(range(len(chosen)), level)]
        assert float(data.level_mean[level]) == pytest.approx(values[of_size].mean(), abs=EXACT)
        assert float(data.order_total[level]) == pytest.approx(data.term.values[of_size].sum(), abs=1e-8)
    for each in ("shapley", "level_mean"):
        assert (data[f"{each}_low"] == data[each]).all()
        assert (data[f"{each}_high"] == data[each]).all()
    assert result.check.passed


@pytest.mark.parametrize("case", CASES)
def test_every_subset_is_its_run(case):
    every_subset_is_its_run(case)


@pytest.mark.parametrize(
    ("case", "method", "kind"),
    [
        ("ten layers", "layer", None),
        ("some layers", "layer", None),
        ("ten writes", "write", "attn"),
        ("ten parallel writes", "write", "mlp"),
    ],
)
def test_a_run_that_is_off_is_noticed(case, method, kind, monkeypatch):
    """The twin of the test above."""
    plant(monkeypatch, ToyTrunk, method, kind)
    with pytest.raises(AssertionError):
        every_subset_is_its_run(case)


def test_a_subset_at_another_place_is_noticed(monkeypatch):
    honest = Tree.values
    monkeypatch.setattr(Tree, "values", lambda *args: np.roll(honest(*args), 1, axis=-1))
    with pytest.raises(AssertionError):
        every_subset_is_its_run("some layers")
    assert not rs.layer_ensemble(toy(4), IDS, TOY_METRIC).check.passed, "and the check notices it, too"


@pytest.mark.parametrize("unit", ["layer", "write"])
def test_the_terms_of_a_linear_net_are_its_paths(unit):
    """m(S) is what the product of the writes in S, and no others, carries from the embedding to the logits."""
    model = LinearToy(random_parts(4, "linear"))
    result = rs.layer_ensemble(model, IDS, TOY_METRIC, unit=unit)
    if unit == "layer":
        hops = [lambda x, pair=pair: through(model, pair, x) - x for pair in model.branches]
    else:
        hops = [part for pair in model.branches for part in pair]
    paths = []
    for number in range(2 ** len(hops)):
        x = model.embedding[IDS]
        for place, hop in enumerate(hops):
            x = hop(x) if number >> place & 1 else x
        logits = (x @ model.head)[0, -1]
        paths.append(float(logits[0] - logits[1]))
    assert np.abs(result.data.term.values[0] - paths).max() < EXACT
    assert np.abs(paths).min() > 1e-6
    # Deleting a unit deletes the half of the paths that goes through it, and leaves the others what they were.
    without = [number for number in range(len(paths)) if not number & 1]
    assert float(result.data.value[0, -2]) == pytest.approx(np.array(paths)[without].sum(), abs=EXACT)
    # On a net that is not linear, terms are no paths.
    bent = rs.layer_ensemble(ToyModel(random_parts(4, "linear")), IDS, TOY_METRIC, unit=unit)
    assert np.abs(bent.data.term.values[0] - paths).max() > 1e-3


# How much is run


def rows_run(monkeypatch, *methods):
    """How many rows each method of a toy's trunk was given, by layer, and the largest number at once."""
    seen = {"rows": {}, "largest": 0}
    for method in methods:
        honest = getattr(ToyTrunk, method)

        def count(self, place, x, honest=honest):
            seen["rows"][str(place)] = seen["rows"].get(str(place), 0) + len(x)
            seen["largest"] = max(seen["largest"], len(x))
            return honest(self, place, x)

        monkeypatch.setattr(ToyTrunk, method, count)
    return seen


@pytest.mark.parametrize("tokens", [4096, 30])
def test_an_exact_ensemble_runs_each_unit_once_for_each_beginning(tokens, monkeypatch):
    monkeypatch.setattr("resstream.measure.removals.removal.TOKENS_PER_CHUNK", tokens)
    model = toy(12)
    base = len(model.branches)
    seen = rows_run(monkeypatch, "layer")
    rs.layer_ensemble(model, IDS, TOY_METRIC)
    # One run more is the base run, and one the model's own.
    assert {int(layer): rows - 2 for layer, rows in seen["rows"].items()} == {i: 2**i for i in range(12)}
    total = sum(seen["rows"].values())
    assert total == 2**12 - 1 + 2 * base
    assert total <= 2**12 * 12 / 8, "an eighth of what as many separate passes run"
    assert seen["largest"] <= tokens // 3


def test_writes_that_read_the_same_state_are_run_once_for_it(monkeypatch):
    seen = rows_run(monkeypatch, "write")
    rs.layer_ensemble(toy(3, layout="parallel"), IDS, TOY_METRIC, unit="write")
    assert seen["rows"] == {f"{layer}.{kind}": 4**layer for layer in range(3) for kind in ("attn", "mlp")}
    assert sum(seen["rows"].values()) < 2**6 - 1


def test_units_above_others_cost_no_more_than_their_beginnings(monkeypatch):
    seen = rows_run(monkeypatch, "layer")
    rs.layer_ensemble(toy(8), IDS, TOY_METRIC, units=[5, 6])
    assert [seen["rows"][str(layer)] - 2 for layer in range(8)] == [0, 0, 0, 0, 0, 1, 2, 4]


def test_orders_share_their_beginnings(monkeypatch):
    """A chain of 21 nested subsets of 20 layers would be 190 layers run one by one; the tree runs about 20^2/4 + 20."""
    model, samples = toy(20), 200
    seen = rows_run(monkeypatch, "layer")
    result = rs.layer_ensemble(model, IDS, TOY_METRIC, samples=samples)
    assert not result.settings["exact"]
    assert sum(seen["rows"].values()) < samples * 125 + comb(20, 2) + 4 * 20


@pytest.mark.parametrize("tokens", [1, 40])
def test_chunks_change_nothing(tokens, tiny, monkeypatch):
    options = {"metric": METRIC, "unit": "write", "how": "mean"}
    whole = [rs.layer_ensemble(tiny, PROMPTS, exact=exact, samples=8, **options).data for exact in (True, False)]
    monkeypatch.setattr("resstream.measure.removals.removal.TOKENS_PER_CHUNK", tokens)
    some = [rs.layer_ensemble(tiny, PROMPTS, exact=exact, samples=8, **options).data for exact in (True, False)]
    for one, other in zip(whole, some, strict=True):
        assert all(np.allclose(one[each], other[each], atol=1e-4, equal_nan=True) for each in one.data_vars)
    assert np.abs(whole[0].value - some[0].value).max() < CLOSE


# Every subset, on models with hooks


def values_by_hand(name, hf_model, model, unit, put):
    """The metric of each prompt with each subset kept, from hooks that put something in place of the rest."""
    units = (
        [(layer, unit) for layer in range(LAYERS)]
        if unit == "layer"
        else [(layer, kind) for layer in range(LAYERS) for kind in ("attn", "mlp")]
    )
    grid = np.zeros((len(PROMPTS), 2 ** len(units)))
    for row, prompt in enumerate(PROMPTS):
        ids = model.tokenize(prompt).ids
        for number in range(2 ** len(units)):
            changes = {}
            for place, (layer, kind) in enumerate(units):
                if not number >> place & 1:
                    changes |= removal([layer], kind, put[row][kind])
            with torch.no_grad():
                grid[row, number] = difference(by_hooks(name, hf_model, ids, changes).logits, row)
    return grid


def stand_ins_by_hand(name, hf_model, model, unit, how):
    """What hooks saw that each unit writes on average; for each kind of unit, one list over layers a prompt."""
    kinds = ("layer",) if unit == "layer" else ("attn", "mlp")
    if how == "skip":
        return [{kind: zeros(prompt) for kind in kinds} for prompt in PROMPTS]
    found = {kind: writes_by_hand(name, hf_model, model, REFERENCE, kind) for kind in kinds}
    means = {
        kind: [torch.cat([prompt[layer] for prompt in writes]).mean(dim=0) for layer in range(LAYERS)]
        for kind, writes in found.items()
    }
    return [means] * len(PROMPTS)


def the_ensemble_is_by_hand(model, unit, how, grid):
    result = rs.layer_ensemble(model, PROMPTS, METRIC, unit=unit, how=how, reference=REFERENCE)
    assert np.abs(result.data.value.values - grid).max() < CLOSE
    assert np.abs(result.data.base.values - grid[:, -1]).max() < CLOSE
    assert np.abs(grid - grid[:, -1:]).max() > 1000 * CLOSE, "and what is removed matters"
    assert result.check.passed


@pytest.mark.parametrize("how", ["skip", "mean"])
@pytest.mark.parametrize("unit", ["layer", "write"])
def test_skip_and_mean_equal_hooks(unit, how, name, hf_model, model):
    put = stand_ins_by_hand(name, hf_model, model, unit, how)
    the_ensemble_is_by_hand(model, unit, how, values_by_hand(name, hf_model, model, unit, put))


@pytest.mark.parametrize("unit", ["layer", "write"])
def test_resample_equals_hooks(unit, name, hf_model, model):
    """Each prompt gets the writes of one reference prompt that is long enough, the same one for every unit."""
    kinds = ("layer",) if unit == "layer" else ("attn", "mlp")
    found = {kind: writes_by_hand(name, hf_model, model, REFERENCE, kind) for kind in kinds}
    lengths = [len(prompt.split()) for prompt in PROMPTS]
    able = [number for number, prompt in enumerate(REFERENCE) if len(prompt.split()) >= max(lengths)]
    cut = [
        [{kind: [write[:length] for write in found[kind][donor]] for kind in kinds} for length in lengths]
        for donor in able
    ]
    grids = np.stack([values_by_hand(name, hf_model, model, unit, put) for put in cut])
    drawn = set()
    for seed in range(5):
        options = {"unit": unit, "how": "resample", "reference": REFERENCE, "seed": seed}
        values = rs.layer_ensemble(model, PROMPTS, METRIC, **options).data.value.values
        errors = np.abs(values - grids).max(axis=2)
        assert (errors.min(axis=0) < CLOSE).all()
        assert (errors.max(axis=0) > 100 * CLOSE).all()
        drawn |= set(errors.argmin(axis=0).tolist())
    assert drawn == {0, 1}, "and each is drawn some time"


@pytest.mark.parametrize("name", ["gpt2", "neox_parallel"], indirect=True)
@pytest.mark.parametrize(("method", "kind", "unit"), [("layer", None, "layer"), ("write", "attn", "write")])
@pytest.mark.parametrize("how", ["skip", "mean"])
def test_an_ensemble_that_is_off_is_noticed(how, method, kind, unit, name, hf_model, model, monkeypatch):
    """The twin of the tests above."""
    put = stand_ins_by_hand(name, hf_model, model, unit, how)
    grid = values_by_hand(name, hf_model, model, unit, put)
    plant(monkeypatch, CausalTrunk, method, kind)
    with pytest.raises(AssertionError):
        the_ensemble_is_by_hand(model, unit, how, grid)


@pytest.mark.parametrize("how", ["skip", "mean", "resample"])
def test_removing_a_layer_is_ablating_it(how, tiny):
    options = {"metric": METRIC, "how": how, "reference": REFERENCE}
    found = rs.layer_ensemble(tiny, PROMPTS, **options).data.value
    sets = [[layer for layer in range(LAYERS) if not number >> layer & 1] for number in range(2**LAYERS)]
    ablated = rs.ablate_layers(tiny, PROMPTS, layers=sets, **options).data.metric
    assert np.abs(found.values - ablated.values).max() < CLOSE


def test_smollm2_layers(smollm2):
    prompt, units = "The Eiffel Tower is in the city of", [3, 22, 29]
    result = rs.layer_ensemble(smollm2, prompt, rs.log_prob(" Paris"), units=units)
    ids = smollm2.tokenizer(prompt, return_tensors="pt")["input_ids"]
    paris = smollm2.tokenizer(" Paris")["input_ids"][0]
    for number in (0, 3, 5):
        gone = [layer for place, layer in enumerate(units) if not number >> place & 1]
        with torch.no_grad():
            changes = removal(gone, "layer", dict.fromkeys(gone, torch.zeros(576)))
            logits = by_hooks("llama", smollm2.hf_model, ids, changes).logits
        assert abs(float(result.data.value[0, number]) - float(logits[-1].log_softmax(-1)[paris])) < 1e-4
    assert result.check.passed


@pytest.mark.parametrize("exact", [True, False])
def test_a_row_of_a_batch_equals_the_row_alone(exact, tiny):
    """Also where prompts differ in length, and where orders are drawn: these depend on prompt and seed alone."""
    options = {"metric": rs.logit_diff(4, 7), "unit": "write", "how": "mean", "reference": REFERENCE}
    options |= {"exact": exact, "samples": 12}
    batch = rs.layer_ensemble(tiny, PROMPTS, **options).data
    for row, prompt in enumerate(PROMPTS):
        alone = rs.layer_ensemble(tiny, prompt, **options).data
        assert np.abs(batch.shapley[row] - alone.shapley[0]).max() < CLOSE
        assert np.abs(batch.level_mean[row] - alone.level_mean[0]).max() < CLOSE
        assert np.allclose(batch.shapley_high[row], alone.shapley_high[0], atol=1e-5)


# Random orders


def sampled(model, seed=0, samples=100, **options):
    return rs.layer_ensemble(model, IDS, TOY_METRIC, exact=False, samples=samples, seed=seed, **options)


def inside(data, name, exact):
    """Whether each interval holds the exact value; one of no width holds what is itself exact."""
    low, high = data[f"{name}_low"].values[0], data[f"{name}_high"].values[0]
    return (low - EXACT <= exact) & (exact <= high + EXACT)


def intervals_hold_what_they_should(model, seeds=40):
    """A 95% interval holds the exact value some 19 times in 20: not much less, nor always, and with each seed alike."""
    exact = rs.layer_ensemble(model, IDS, TOY_METRIC, exact=True).data
    found = [sampled(model, seed).data for seed in range(seeds)]
    shapley = np.array([inside(data, "shapley", exact.shapley.values[0]) for data in found])
    levels = np.array([inside(data, "level_mean", exact.level_mean.values[0])[3:-1] for data in found])
    for held in (shapley, levels):
        assert 0.92 <= held.mean() <= 0.98
        # Of ten intervals, three or more miss once in eighty seeds.
        assert (held.mean(axis=1) >= 0.7).mean() >= 19 / 20
    errors = np.array([data.shapley.values[0] - exact.shapley.values[0] for data in found])
    assert (np.abs(errors.mean(axis=0)) < 4 * errors.std(axis=0) / np.sqrt(seeds)).all(), "and there is no bias"


NETS = {"sequential": lambda: toy(10), "parallel": lambda: toy(10, layout="parallel", seed=4)}


@pytest.mark.parametrize("net", NETS)
def test_intervals_hold_what_they_should(net):
    intervals_hold_what_they_should(NETS[net]())


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_intervals_of_the_wrong_width_are_noticed(factor, monkeypatch):
    """The twin of the test above."""
    honest = ensemble.mean_with_interval

    def planted(draws):
        mean, half = honest(draws)
        return mean, half * factor

    monkeypatch.setattr(ensemble, "mean_with_interval", planted)
    with pytest.raises(AssertionError):
        intervals_hold_what_they_should(toy(10))


def orders_that_are_not_uniform(tokens, units, seed):
    """Orders in which the units always join from the bottom up, or from the top down."""
    while True:
        yield np.stack([np.stack([np.arange(units), np.arange(units)[::-1]])] * len(tokens))


def test_orders_that_are_not_uniform_are_noticed(monkeypatch):
    monkeypatch.setattr(ensemble, "_draws", orders_that_are_not_uniform)
    with pytest.raises(AssertionError):
        intervals_hold_what_they_should(toy(10))


def what_is_known_exactly(model):
    exact, result = rs.layer_ensemble(model, IDS, TOY_METRIC, exact=True).data, sampled(model, samples=10)
    data = result.data
    whole, none = float(exact.value[0, -1]), float(exact.value[0, 0])
    assert float(data.shapley.sum()) == pytest.approx(whole - none, abs=EXACT)
    assert float(data.level_mean[0, -1]) == float(data.level_mean_high[0, -1]) == pytest.approx(whole, abs=EXACT)
    assert float(data.base[0]) == pytest.approx(whole, abs=EXACT)
    assert np.abs(data.order_total[0, :3] - subsets.order_totals(exact.level_mean.values, 10)[0, :3]).max() < 1e-9
    assert data.order_total[0, 3:].isnull().all()
    assert np.abs(data.level_mean[0, :3] - exact.level_mean[0, :3]).max() < EXACT
    assert not {"value", "term", "interaction"} & set(data)
    assert result.check.passed


def test_what_is_known_exactly():
    what_is_known_exactly(toy(10))


@pytest.mark.parametrize("function", ["gains_by_unit", "order_totals"])
def test_a_sum_that_is_off_is_noticed(function, monkeypatch):
    """The twin of the test above."""
    honest = getattr(ensemble, function)
    monkeypatch.setattr(ensemble, function, lambda *args: 1.001 * honest(*args))
    result = sampled(toy(10), samples=10)
    assert result.check.passed == (function == "order_totals")
    with pytest.raises(AssertionError):
        what_is_known_exactly(toy(10))


def test_along_every_single_order_the_gains_sum_to_the_whole(monkeypatch):
    seen = []
    honest = ensemble.gains_by_unit
    monkeypatch.setattr(ensemble, "gains_by_unit", lambda *args: seen.append(honest(*args)) or seen[-1])
    data = sampled(toy(10), samples=12).data
    assert seen[0].shape == (1, 6, 2, 10)
    whole = float(data.level_mean[0, -1] - data.level_mean[0, 0])
    assert np.abs(seen[0].sum(axis=-1) - whole).max() < EXACT


def test_the_second_order_of_a_pair_is_the_first_backwards(tiny):
    tokens = tiny.tokenize(PROMPTS)
    draws = ensemble._draws(tokens, 8, seed=0)
    first, second = next(draws), next(draws)
    assert first.shape == (3, 2, 8)
    assert (first[:, 0] == first[:, 1, ::-1]).all()
    assert (np.sort(first) == np.arange(8)).all()
    assert not (first == second).all()
    assert len({tuple(orders[0]) for orders in first}) == 3, "prompts draw on their own"


@pytest.mark.parametrize("samples", [1, 2, 4])
def test_few_samples_give_no_interval(samples):
    result = sampled(toy(6), samples=samples)
    assert result.settings["samples_done"] == max(2, samples)
    assert result.data.shapley_high.isnull().all()
    assert result.data.level_mean_low[0, 3:-1].isnull().all()
    assert result.data.level_mean_low[0, [0, 1, 2, 6]].notnull().all()
    assert result.check.passed


@pytest.mark.parametrize("layers", [1, 2])
def test_a_few_units_can_be_sampled_too(layers):
    exact, found = rs.layer_ensemble(toy(layers), IDS, TOY_METRIC).data, sampled(toy(layers), samples=6).data
    assert np.abs(found.shapley - exact.shapley).max() < EXACT
    assert np.abs(found.order_total - exact.order_total).max() < EXACT


def test_every_subset_is_run_where_there_are_few_units():
    assert rs.layer_ensemble(toy(12), IDS, TOY_METRIC).settings["exact"]
    assert not rs.layer_ensemble(toy(13), IDS, TOY_METRIC, samples=4).settings["exact"]
    assert rs.layer_ensemble(toy(13), IDS, TOY_METRIC, exact=True).data.sizes["subset"] == 2**13


@pytest.mark.parametrize("orders", [0, 1, 2])
def test_only_the_orders_that_are_needed_are_run(orders):
    data = sampled(toy(6), samples=10, orders=orders).data
    assert data.order_total.notnull().sum() == orders + 1
    assert (data.level_mean_low == data.level_mean_high).sum() == orders + 2


# Interruption


def interrupting(monkeypatch, after):
    """Let Ctrl-C arrive in the middle of a run, once so many pairs of orders are done."""
    monkeypatch.setattr("resstream.measure.removals.removal.TOKENS_PER_CHUNK", 1)
    honest, calls = Tree.values, []

    def values(self, *args):
        calls.append(None)
        if len(calls) > after + 1:
            raise KeyboardInterrupt
        return honest(self, *args)

    monkeypatch.setattr(Tree, "values", values)


def test_an_interrupted_sample_is_a_smaller_one(monkeypatch):
    expected = sampled(toy(8), samples=10)
    interrupting(monkeypatch, after=5)
    with pytest.warns(UserWarning, match="interrupted after 10 of 100 samples"):
        result = sampled(toy(8), samples=100)
    assert (result.settings["samples"], result.settings["samples_done"]) == (100, 10)
    assert expected.settings["samples_done"] == 10
    for each in result.data.data_vars:
        assert np.allclose(result.data[each], expected.data[each], atol=EXACT, equal_nan=True), each
    assert result.check.passed
    assert "10 orders of 8 layers" in result.headline


def test_an_interrupt_leaves_the_model_as_it_was(monkeypatch):
    monkeypatch.setattr("resstream.measure.removals.removal.TOKENS_PER_CHUNK", 1)
    hf_model, calls = ARCHITECTURES["llama"]().train(), []
    model = rs.load(hf_model, tokenizer=tokenizer())

    def interrupt(*_):
        calls.append(None)
        if len(calls) > 300:
            raise KeyboardInterrupt

    blocks_of(hf_model)[1].register_forward_pre_hook(interrupt)
    before = state_of(hf_model)
    with pytest.warns(UserWarning, match="interrupted"):
        result = rs.layer_ensemble(model, PROMPTS, METRIC, exact=False, samples=1000)
    assert 0 < result.settings["samples_done"] < 1000
    assert state_of(hf_model) == before


@pytest.mark.parametrize("after", [-1, 0])
def test_with_nothing_done_an_interrupt_is_one(after, monkeypatch):
    interrupting(monkeypatch, after)
    with pytest.raises(KeyboardInterrupt):
        sampled(toy(8))


def test_a_sample_that_ends_in_time_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sampled(toy(8), samples=6).settings["samples_done"] == 6


# Labels and the check


def test_labels(tiny):
    result = rs.layer_ensemble(tiny, PROMPTS, METRIC)
    data = result.data
    assert {each: data[each].dims for each in data.data_vars} == {
        "value": ("prompt", "subset"),
        "term": ("prompt", "subset"),
        "interaction": ("prompt", "unit", "unit_2"),
        "order_total": ("prompt", "order"),
        **{f"shapley{end}": ("prompt", "unit") for end in ("", "_low", "_high")},
        **{f"level_mean{end}": ("prompt", "order") for end in ("", "_low", "_high")},
        "base": ("prompt",),
    }
    assert data.unit.values.tolist() == data.unit_2.values.tolist() == ["0", "1", "2"]
    assert data.subset.values.tolist() == list(range(8))
    assert data.order.values.tolist() == [0, 1, 2, 3]
    assert data.text.values.tolist() == ["".join(prompt.split()) for prompt in PROMPTS]
    assert result.settings == {
        "unit": "layer",
        "how": "skip",
        "metric": "logit difference of 3 answers - 7",
        "units": "logits",
        "exact": True,
        "seed": 0,
        "samples": 0,
        "samples_done": 0,
    }
    mean = data.shapley.mean("prompt")
    largest = int(np.abs(mean.values).argmax())
    assert f"largest Shapley value {largest} ({float(mean[largest]):+.2f})" in result.headline
    assert result.headline.startswith("all 2^3 subsets of 3 layers by skip; f(all) ")
    default = rs.layer_ensemble(tiny, PROMPTS)
    assert (default.settings["metric"], default.settings["units"]) == ("loss", "nats")


def test_the_interval_of_the_headline_is_that_of_the_mean(tiny):
    result = rs.layer_ensemble(tiny, PROMPTS, METRIC, exact=False, samples=20)
    largest = int(np.abs(result.data.shapley.mean("prompt").values).argmax())
    half = (result.data.shapley_high - result.data.shapley)[:, largest].values
    assert f"± {np.sqrt((half**2).sum()) / 3:.2g})" in result.headline
    json.dumps(result.settings, allow_nan=False)


@pytest.mark.parametrize("exact", [True, False])
def test_it_can_be_saved_and_opened(exact, tiny, tmp_path):
    result = rs.layer_ensemble(tiny, PROMPTS, METRIC, unit="write", exact=exact, samples=6)
    again = rs.open_result(result.save(tmp_path / "ensemble.nc"))
    assert again.data.identical(result.data)
    assert again.settings == result.settings
    assert repr(again) == repr(result)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("method", ["layer", "readout"])
def test_the_check_notices_a_planted_error(method, exact, tiny, monkeypatch):
    plant(monkeypatch, CausalTrunk if method == "layer" else CausalLM, method)
    check = rs.layer_ensemble(tiny, PROMPTS, METRIC, exact=exact, samples=6).check
    assert not check.passed
    assert check.name == "Shapley values sum to f(all) - f(none), and f(all) is the model's own"
    assert check.where == "the base run"


@pytest.mark.parametrize("exact", [True, False])
def test_the_check_notices_writes_that_are_not_the_models(exact, tiny, monkeypatch):
    plant(monkeypatch, CausalTrunk, "write", "mlp")
    check = rs.layer_ensemble(tiny, PROMPTS, METRIC, unit="write", exact=exact, samples=6).check
    assert not check.passed
    assert check.where == "the run of all units"


def test_the_check_notices_values_that_do_not_add_up(tiny, monkeypatch):
    monkeypatch.setattr(ensemble, "shapley", lambda values: 1.001 * subsets.shapley(values))
    check = rs.layer_ensemble(tiny, PROMPTS, METRIC).check
    assert not check.passed
    assert check.where == "the sum of the Shapley values"


def test_what_is_not_a_number_has_not_passed():
    model = toy(3)
    model.branches[1] = (lambda x: x * float("nan"), model.branches[1][1])
    assert not rs.layer_ensemble(model, IDS, TOY_METRIC).check.passed


# Errors


WRONG = {
    "unit": ({"unit": "head"}, SiteError, 'unit="head"', "is not known", "choose from 'layer', 'write'"),
    "how": ({"how": "remove"}, SiteError, 'how="remove"', "choose from 'skip', 'mean', 'resample'"),
    "layer": ({"units": [0, 3]}, SiteError, "no layer 3", "tiny has layers 0-2", "did you mean 2?"),
    "a write among layers": ({"units": ["1.attn"]}, SiteError, 'units=["1.attn"]', 'write unit="write"'),
    "no layers": ({"units": []}, SiteError, "units=[]", "name some layers, such as units=[0, 5]"),
    "write": (
        {"unit": "write", "units": ["3.attn"]},
        SiteError,
        'no site "3.attn"',
        "tiny has layers 0-2",
        'did you mean "2.attn"?',
    ),
    "state": (
        {"unit": "write", "units": ["1.attn", "1.resid_mid"]},
        SiteError,
        "1.resid_mid",
        "only what a branch writes can be removed",
        'units=["0.attn", "0.mlp"]',
    ),
    "no writes": ({"unit": "write", "units": []}, SiteError, "units=[]", 'such as units=["0.attn", "0.mlp"]'),
    "orders": (
        {"exact": False, "orders": 3},
        MetricError,
        "orders=3",
        "would be noise",
        "C(n, k) times a difference of sampled means, here 1 times",
        "exact=True with up to 16 units",
    ),
    "negative orders": ({"orders": -1}, MetricError, "orders=-1", "no orders below 0"),
    "no samples": ({"exact": False, "samples": 0}, MetricError, "samples=0", "at least one sample"),
    "no partner": ({"how": "resample"}, PromptError, "prompt 0 has 5 tokens", "give some with reference=[...]"),
    "answers": ({"metric": rs.log_prob([1, 2])}, MetricError, "2 answers", "for 3 prompts"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_choice(case, tiny):
    options, kind, *parts = WRONG[case]
    with unchecked(), pytest.raises(kind) as error:
        rs.layer_ensemble(tiny, PROMPTS, **options)
    assert says(error, *parts)


def test_too_many_units_for_every_subset():
    with pytest.raises(SiteError) as error:
        rs.layer_ensemble(toy(17), IDS, TOY_METRIC, exact=True)
    assert says(error, "17 layers have 2^17 subsets", "more than 2^16", "units=[...]", "leave exact out")


def test_order_totals_of_many_units_are_refused_with_the_noise_they_would_have():
    with pytest.raises(MetricError) as error:
        rs.layer_ensemble(toy(30), IDS, TOY_METRIC, orders=5)
    assert says(error, "orders=5", "order totals above 2", f"here {comb(30, 5)} times", "orders=2")


def test_an_edited_model_is_refused(tiny):
    with rs.edited(tiny, rs.Zero("1.mlp")) as m, pytest.raises(EditError, match="layer_ensemble"):
        rs.layer_ensemble(m, PROMPTS)


def test_units_in_any_order_and_twice_are_the_same(tiny):
    plain = rs.layer_ensemble(tiny, PROMPTS, METRIC, units=[0, 2]).data
    assert plain.identical(rs.layer_ensemble(tiny, PROMPTS, METRIC, units=[-1, 0, 2, 0]).data)
    assert plain.identical(rs.layer_ensemble(tiny, PROMPTS, METRIC, units=range(0, 3, 2)).data)
    writes = rs.layer_ensemble(tiny, PROMPTS, METRIC, unit="write", units=["2.attn", "0.mlp", "0.attn"]).data
    assert writes.unit.values.tolist() == ["0.attn", "0.mlp", "2.attn"]


def test_the_model_is_as_it_was(name, monkeypatch):
    hf_model = ARCHITECTURES[name]().train()
    model = rs.load(hf_model, tokenizer=tokenizer())
    before = state_of(hf_model)
    for how, exact in (("skip", True), ("mean", False), ("resample", True)):
        rs.layer_ensemble(model, PROMPTS, how=how, unit="write", exact=exact, samples=4, reference=REFERENCE)
    assert state_of(hf_model) == before

    def fail(*_):
        raise Planted

    blocks_of(hf_model)[1].register_forward_pre_hook(fail)
    before = state_of(hf_model)
    with pytest.raises(Planted):
        rs.layer_ensemble(model, PROMPTS)
    assert state_of(hf_model) == before


# The picture


def drawn(result, panel, **options):
    ax = Figure().add_subplot()
    assert result.plot(ax, panel=panel, **options) is ax
    return ax


@pytest.mark.parametrize("exact", [True, False])
def test_the_picture_shows_the_values(exact, tiny):
    result = rs.layer_ensemble(tiny, PROMPTS, METRIC, unit="write", exact=exact, samples=20)
    data = result.data
    for options, some in (({}, data), ({"prompt": 1}, data.isel(prompt=[1]))):
        bars = [bar.get_height() for bar in drawn(result, "shapley", **options).patches]
        assert np.allclose(bars, some.shapley.mean("prompt"))
        line = drawn(result, "level_mean", **options).lines[1]
        assert np.allclose(line.get_ydata(), some.level_mean.mean("prompt"))
    known = data.order_total.mean("prompt").values[: 7 if exact else 3]
    assert np.allclose([bar.get_height() for bar in drawn(result, "order_total").patches], known)
    labels = [label.get_text() for label in drawn(result, "shapley").get_xticklabels()]
    assert labels[0] == "0.attn"


def test_the_picture_shows_the_interval_of_the_mean(tiny):
    result = rs.layer_ensemble(tiny, PROMPTS, METRIC, exact=False, samples=20)
    (lines,) = drawn(result, "shapley").collections
    reach = np.array([segment[1, 1] - segment[0, 1] for segment in lines.get_segments()])
    half = (result.data.shapley_high - result.data.shapley).values
    assert np.allclose(reach, 2 * np.sqrt((half**2).sum(axis=0)) / 3)
    assert not np.allclose(reach, 2 * half.mean(axis=0))
    writes = rs.layer_ensemble(tiny, PROMPTS, METRIC, unit="write", exact=False, samples=20)
    assert len(drawn(writes, "level_mean").collections) == 1
    assert not drawn(rs.layer_ensemble(tiny, PROMPTS, METRIC), "shapley").collections


@pytest.mark.parametrize("exact", [True, False])
def test_a_figure_has_order_totals_where_every_subset_was_run(exact, tiny):
    import matplotlib.pyplot as plt

    ax = rs.layer_ensemble(tiny, PROMPTS, METRIC, exact=exact, samples=6).plot()
    titles = [each.get_title(loc="left") for each in ax.figure.axes]
    assert titles[0] == ax.get_title(loc="left") == "What each unit adds to a set of others, on average"
    assert len(titles) == (3 if exact else 2)
    assert "mean of 3 prompts" in ax.figure.get_suptitle()
    plt.close(ax.figure)


def test_a_panel_that_does_not_exist_is_refused(tiny):
    result = rs.layer_ensemble(tiny, PROMPTS, METRIC)
    with pytest.raises(ResultError, match=r"panel='pie'.*'shapley', 'level_mean', 'order_total'"):
        drawn(result, "pie")
    with pytest.raises(ResultError, match="needs the variable"):
        replace(result, data=result.data.drop_vars("shapley")).plot(Figure().add_subplot())
