"""Measures on trunks that do something to the stream itself, against plain loops that write out every step by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import comb

import numpy as np
import pytest
import torch
from measure.test_paths import CARRYING, PLAIN, POSITIONS, Part, ToyModel, gate, random_parts, same, scaled

import resstream as rs
from resstream.errors import SiteError
from resstream.models.carry import UNCHANGED
from resstream.sites import Site
from resstream.stream import slopes

EXACT = 1e-10  # float64
METRIC = rs.logit_diff(0, 1)
IDS = torch.tensor([[1, 2, 3][:POSITIONS], [4, 0, 5][:POSITIONS]])
REFERENCE = torch.tensor([[5, 3, 0][:POSITIONS]])
CLEAN, CORRUPTED = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 5, 0]])
NOTHING = torch.zeros_like


def plain_net(layers: int, layout: str = "sequential", seed: int = 0) -> ToyModel:
    """A net without a skip, x <- F(x): its trunk lets nothing of the stream pass."""
    maps = [((NOTHING, same),) * 2] * layers
    return ToyModel(random_parts(layers, "tanh", seed=seed), layout=layout, seed=seed, maps=maps)


def highway() -> ToyModel:
    maps = [((gate(2 * n), same), (gate(2 * n + 1), same)) for n in range(3)]
    return ToyModel(random_parts(3, "tanh", seed=10), seed=10, maps=maps)


CASES = {
    **CARRYING,
    "highway": highway,
    "plain": lambda: plain_net(3, seed=11),
    "parallel plain": lambda: plain_net(3, "parallel", seed=12),
}


class LinearToy(ToyModel):
    """A toy whose readout is linear too, so that the whole network is."""

    def readout(self, x, vocab=None):
        return x @ self.head if vocab is None else (x @ self.head)[..., list(vocab)]


class Stack(ToyModel):
    """A stack of MLPs: the attention branch of each layer writes nothing, and is no step of the trunk."""

    n_heads = 0
    steps = property(lambda self: tuple((Site(layer, "mlp"),) for layer in range(self.n_layers)))


class LinearStack(LinearToy, Stack):
    """The same with a linear readout."""


def stack(kind: str, passing: Part = same, after: Part = same, layers: int = 4, make: type[Stack] = Stack) -> Stack:
    parts = [(NOTHING, mlp) for _, mlp in random_parts(layers, kind, seed=20)]
    return make(parts, layout="parallel", seed=20, maps=[((passing, after),) * 2] * layers)


STACKS = {
    "residual": lambda: stack("tanh"),
    "scaled skip": lambda: stack("tanh", scaled(0.8)),
    "norm after the sum": lambda: stack("tanh", same, lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:])),
    "plain": lambda: stack("tanh", NOTHING),
}
EVERYTHING = {**CASES, **{f"MLPs, {name}": make for name, make in STACKS.items()}}
FEW = [
    "scaled skip",
    "norm on the trunk",
    "parallel norm on the trunk",
    "parallel highway",
    "plain",
    "MLPs, residual",
    "MLPs, norm after the sum",
]


# The hand: every step written out, and nothing of the library in it.


def steps_of(model, layer):
    """The steps of a layer: its branches by name, and what the trunk does before and after they are added."""
    (attn, mlp), (first, second) = model.branches[layer], model.maps[layer]
    if model.layout == "parallel":
        return [({f"{layer}.attn": attn, f"{layer}.mlp": mlp}, first)]
    return [({f"{layer}.attn": attn}, first), ({f"{layer}.mlp": mlp}, second)]


def hand(model, ids, change=None, order=None):
    """A run with functions applied at some sites, its values there, and what the readout reads."""
    values: dict[str, torch.Tensor] = {}

    def at(site: str, value: torch.Tensor) -> torch.Tensor:
        values[site] = (change or {}).get(site, same)(value)
        return values[site]

    x = model.embedding[ids]
    for layer in range(model.n_layers) if order is None else order:
        x = at(f"{layer}.resid_pre", x)
        for parts, (before, after) in steps_of(model, layer):
            x = after(before(x) + sum(at(name, part(x)) for name, part in parts.items()))
            if [*parts] == [f"{layer}.attn"]:
                x = at(f"{layer}.resid_mid", x)
        x = at(f"{layer}.resid_post", x)
    return values, x


def difference(model, x):
    logits = model.readout(x)[:, -1]
    return (logits[:, 0] - logits[:, 1]).numpy()


def writes_of(layer, unit="layer"):
    return [f"{layer}.{kind}" for kind in ("attn", "mlp") if unit in ("layer", kind)]


def always(value):
    return lambda _: value


def close(found, expected):
    return bool(np.abs(np.asarray(found) - np.asarray(expected)).max() < EXACT)


@pytest.fixture
def forgetful(monkeypatch):
    """A model that forgets to say what its trunk does, while its layers still do it."""
    return lambda: monkeypatch.setattr(ToyModel, "carry", lambda self, step: UNCHANGED)


# Removal


def stand_in(model, how) -> Callable[[str], Part]:
    """What takes the place of a write, by its name."""
    reference, _ = hand(model, REFERENCE)
    return {
        "skip": lambda name: NOTHING,
        "zero": lambda name: NOTHING,
        "mean": lambda name: lambda x: reference[name].mean((0, 1)).expand_as(x),
        "resample": lambda name: lambda x: reference[name].expand_as(x),
    }[how]


def ablated(model, unit, how, sets):
    """The metric of each prompt without each set of layers, or without one branch of them."""
    instead, found = stand_in(model, how), []
    for some in sets:
        order = [layer for layer in range(model.n_layers) if (unit, how) != ("layer", "skip") or layer not in some]
        change = {name: instead(name) for layer in some for name in writes_of(layer, unit)}
        found.append(difference(model, hand(model, IDS, change, order)[1]))
    return np.stack(found, axis=1)


@pytest.mark.parametrize("how", ["skip", "zero", "mean", "resample"])
@pytest.mark.parametrize("unit", ["layer", "attn", "mlp"])
@pytest.mark.parametrize("case", FEW)
def test_what_takes_the_place_of_a_write_goes_through_the_trunk(case, unit, how, forgetful):
    model = EVERYTHING[case]()
    sets = [[layer] for layer in range(model.n_layers)] + [[0, model.n_layers - 1], []]

    def found():
        options = {"unit": unit, "how": how, "layers": sets, "metric": METRIC, "reference": REFERENCE}
        return rs.ablate_layers(model, IDS, **options).data.metric.values

    expected = ablated(model, unit, how, sets)
    assert close(found(), expected)
    if (unit, how) == ("layer", "skip"):
        # A layer that is left out takes what its trunk does with it; one that writes nothing does not.
        assert close(expected, ablated(model, unit, "zero", sets)) != bool(model.carried)
    elif model.carried and not (unit == "attn" and isinstance(model, Stack)):
        forgetful()
        assert not close(found(), expected)


# The ensemble


@pytest.mark.parametrize("how", ["skip", "mean", "resample"])
@pytest.mark.parametrize("unit", ["layer", "write"])
@pytest.mark.parametrize("case", EVERYTHING)
def test_every_subset_is_a_run_in_which_the_others_write_nothing(case, unit, how, forgetful):
    model = EVERYTHING[case]()
    units = list(range(model.n_layers)) if unit == "layer" else list(model.writes)[:5]
    instead, expected = stand_in(model, how), []
    for number in range(2 ** len(units)):
        gone = [each for place, each in enumerate(units) if not number >> place & 1]
        names = [name for each in gone for name in (writes_of(each) if unit == "layer" else [each])]
        expected.append(difference(model, hand(model, IDS, {name: instead(name) for name in names})[1]))
    options = {"unit": unit, "units": units, "how": how, "reference": REFERENCE}
    result = rs.layer_ensemble(model, IDS, METRIC, **options)
    assert result.check.passed
    assert close(result.data.value.values, np.stack(expected, axis=1))
    if model.carried:
        forgetful()
        assert not close(rs.layer_ensemble(model, IDS, METRIC, **options).data.value.values, np.stack(expected, axis=1))


@pytest.mark.parametrize("kind", ["sequential", "parallel", "MLPs"])
@pytest.mark.parametrize("skip", [0.8, 1.1, -0.5])
def test_terms_of_a_linear_net_with_a_scaled_skip_are_its_paths(skip, kind, forgetful):
    """Those of order k sum to C(n, k) j^k lambda^(n - k), with two hops of j at each step in parallel."""
    j, after, layers = 0.3, 1.25, 3
    maps = [((scaled(skip), scaled(after)),) * 2] * layers
    attn, make = (NOTHING, LinearStack) if kind == "MLPs" else (scaled(j), LinearToy)
    model = make([(attn, scaled(j))] * layers, layout="sequential" if kind == "sequential" else "parallel", maps=maps)
    n, hops = {"sequential": (2 * layers, 1), "parallel": (layers, 2), "MLPs": (layers, 1)}[kind]
    start = difference(model, model.embedding[IDS])[:, None]
    sums = start * [after**n * comb(n, k) * (hops * j) ** k * skip ** (n - k) for k in range(n + 1)]

    def found(**options):
        return rs.layer_ensemble(model, IDS, METRIC, unit="write", **options).data

    data = found()
    assert close(data.order_total.values[:, : n + 1], sums)
    assert not (np.abs(data.order_total.values[:, n + 1 :]) > EXACT).any()
    assert close(found(exact=False, samples=2).order_total.values[:, :3], sums[:, :3])
    if hops == 1:
        sizes = np.array([bin(number).count("1") for number in range(2**n)])
        assert close(data.term.values, start * after**n * j**sizes * skip ** (n - sizes))
    forgetful()
    assert not close(found().order_total.values[:, : n + 1], sums)


# Lesions


def step_by_hand(model, unit, number, x, writes=True, maps=None):
    """The stream after one unit, which may write nothing; `maps` are of another layer where factors stay behind."""
    layer, part = (number, slice(None)) if unit == "layer" else (number // 2, slice(number % 2, number % 2 + 1))
    if unit == "write" and model.layout == "parallel":
        layer, part = number, slice(None)
    for (parts, own), other in zip(
        steps_of(model, layer)[part], steps_of(model, layer if maps is None else maps)[part], strict=True
    ):
        before, after = own if maps is None else other[1]
        x = after(before(x) + sum(branch(x) if writes else NOTHING(x) for branch in parts.values()))
    return x


def loss_of(model, x):
    logits = model.readout(x)[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten(), reduction="none").view(
        len(IDS), -1
    )


def in_order(model, unit, order, stay=False):
    """The mean loss of an order, as it is spelled; with `stay`, layers leave their factors where they are."""
    x = model.embedding[IDS]
    for place, step in enumerate(re.findall(r"\(.*?\)|\d+", order)):
        numbers = [int(number) for number in re.findall(r"\d+", step)]
        after = [step_by_hand(model, unit, number, x, maps=place if stay else None) for number in numbers]
        x = after[0] if len(after) == 1 else x + sum(each - x for each in after)
    return loss_of(model, x).mean(1).numpy()


def without(model, unit, gone, n):
    x = model.embedding[IDS]
    for number in range(n):
        x = step_by_hand(model, unit, number, x, writes=number not in gone)
    return loss_of(model, x).mean(1).numpy()


def lesions_are_runs(model, unit, how):
    n = model.n_layers if unit == "layer" else len(model.writes)
    data = rs.lesion_curve(model, IDS, how=how, unit=unit, samples=2).data
    for count, sample in np.ndindex(data.order.shape):
        here = data.isel(lesion=count, sample=sample)
        order, size = str(here.order.values), int(here.lesion)
        ran = [int(number) for number in re.findall(r"\d+", order)]
        middle = range((n - size) // 2, (n - size) // 2 + size)
        displaced = [place for place, number in enumerate(ran) if place != number]
        deleted = how == "delete"
        expected = without(model, unit, {*range(n)} - {*ran}, n) if deleted else in_order(model, unit, order)
        assert close(here.loss.values, expected)
        gone = displaced if how in ("shuffle", "swap") else middle
        assert close(here.loss_control.values, without(model, unit, gone, n))


HOW = ["delete", "shuffle", "swap", "scramble", "reverse", "parallel", "repeat"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("unit", ["layer", "write"])
@pytest.mark.parametrize("case", FEW)
def test_lesions_move_layers_with_their_factors_and_delete_only_what_they_write(case, unit, how, forgetful):
    model = EVERYTHING[case]()
    if unit == "write" and model.layout == "parallel" and not isinstance(model, Stack):
        with pytest.raises(SiteError, match="both writes of a layer read the same input"):
            rs.lesion_curve(model, IDS, how=how, unit=unit)
        return
    lesions_are_runs(model, unit, how)
    if model.carried:
        forgetful()
        with pytest.raises(AssertionError):
            lesions_are_runs(model, unit, how)


@pytest.mark.parametrize("case", ["tanh on the trunk", "parallel highway"])
def test_a_layer_that_leaves_its_factors_behind_is_another_lesion(case):
    """The twin of the orders above, whose layers run whole: here factors differ from layer to layer."""
    model = CASES[case]()
    data = rs.lesion_curve(model, IDS, how="reverse", counts=[model.n_layers]).data.isel(lesion=0, sample=0)
    order = str(data.order.values)
    assert close(data.loss.values, in_order(model, "layer", order))
    assert not close(data.loss.values, in_order(model, "layer", order, stay=True))


# Edits


def edits_of(model, site):
    """Edits at one site, each with the function that it is."""
    vector = torch.linspace(-1, 1, model.d_model, dtype=torch.float64)
    reference = hand(model, REFERENCE)[0][site]
    return [
        (rs.Add(site, vector), lambda x: x + vector),
        (rs.Replace(site, vector), lambda x: vector.expand_as(x)),
        (rs.Zero(site, positions=-1), lambda x: torch.cat([x[:, :-1], NOTHING(x[:, -1:])], dim=1)),
        (rs.Scale(site, 0.5), lambda x: 0.5 * x),
        (rs.Mean(site, REFERENCE), lambda x: reference.mean((0, 1)).expand_as(x)),
        (rs.Resample(site, REFERENCE), lambda x: reference.expand_as(x)),
        (rs.Apply(site, lambda x, _: x.sin()), torch.sin),
    ]


def edits_are_their_runs(model):
    middle = ["resid_mid"] if model.layout == "sequential" else []
    states = ["resid_pre", *middle, "resid_post", *{name.split(".")[1] for name in model.writes}]
    for site in (f"0.{kind}" for kind in states):
        for edit, function in edits_of(model, site):
            values, final = hand(model, IDS, {site: function})
            with rs.edited(model, edit) as edited:
                assert close(edited.logits(IDS), model.readout(final))
                stream = rs.read(edited, IDS, sites=states)
            # What comes next reads a layer's input and output as they were edited there.
            assert all(close(stream[name], values[name]) for name in stream.sites)


@pytest.mark.parametrize("case", FEW)
def test_an_edit_finds_at_each_site_what_read_shows_there(case, forgetful):
    model = EVERYTHING[case]()
    stream, values = rs.read(model, IDS, sites=["resid_pre", "attn", "mlp", "resid_post"]), hand(model, IDS)[0]
    assert all(close(stream[site], values[site]) for site in stream.sites)
    edits_are_their_runs(model)
    if model.carried:
        forgetful()
        with pytest.raises(AssertionError):
            edits_are_their_runs(model)


@pytest.mark.parametrize("case", EVERYTHING)
def test_layers_are_skipped_and_moved_with_their_factors(case):
    model, layers = EVERYTHING[case](), [*range(EVERYTHING[case]().n_layers)]

    def found(*edits):
        with rs.edited(model, *edits) as edited:
            return edited.logits(IDS)

    def expected(change=None, order=None):
        return model.readout(hand(model, IDS, change, order)[1])

    assert close(found(rs.Skip(1)), expected(order=[0, *layers[2:]]))
    assert close(found(rs.Reorder([2, 1, 1, 0])), expected(order=[2, 1, 1, 0]))
    assert close(found(rs.Skip("1.mlp")), expected({"1.mlp": NOTHING}))
    branches = [str(site) for step in model.steps for site in step if site.layer == 1]
    both = found(*map(rs.Skip, branches))
    assert close(both, expected(dict.fromkeys(branches, NOTHING)))
    # The twin: a layer that writes nothing is one that is skipped only where the trunk does nothing there.
    assert close(both, found(rs.Skip(1))) == model.adds_up(1)


def test_an_edited_model_still_says_what_its_trunk_does():
    model = CASES["scaled skip"]()
    with rs.edited(model, rs.Scale("0.attn", 0.5)) as edited:
        assert (edited.steps, edited.carried) == (model.steps, model.carried)
        assert not edited.adds_up(0)
        halved = ToyModel(
            [(lambda x: 0.5 * model.branches[0][0](x), model.branches[0][1]), *model.branches[1:]], seed=5
        )
        halved.maps = model.maps
        assert close(edited.logits(IDS), halved.logits(IDS))
    stacked = STACKS["residual"]()
    with rs.edited(stacked, rs.Add("0.mlp", torch.ones(stacked.d_model))) as edited:
        assert edited.writes == stacked.writes


# Paths between writes


def path_by_hand(model, senders, receivers, frozen="all", position=None):
    """The metric of the corrupted run in which receivers read what senders write in the clean one."""
    own, other = hand(model, CORRUPTED)[0], hand(model, CLEAN)[0]
    own["embed"], other["embed"] = own["0.resid_pre"], other["0.resid_pre"]
    held = [name for name in own if name.split(".")[-1] in ("attn", "mlp")[: 1 + (frozen == "all")]]
    change = {name: always(own[name]) for name in held}
    for sender in senders:
        here = torch.ones(POSITIONS, 1, dtype=torch.bool)
        if position is not None:
            here = torch.arange(POSITIONS)[:, None] == position
        change["0.resid_pre" if sender == "embed" else sender] = always(torch.where(here, other[sender], own[sender]))
    values, final = hand(model, CORRUPTED, change)
    new = {}
    for layer, kind in (receiver.split(".") for receiver in receivers if receiver != "logits"):
        reads = f"{layer}.{'resid_mid' if kind == 'mlp' and model.layout == 'sequential' else 'resid_pre'}"
        if not torch.equal(values[reads], own[reads]):
            new[f"{layer}.{kind}"] = always(model.branches[int(layer)][kind == "mlp"](values[reads]))
    return float(difference(model, final if receivers == ["logits"] else hand(model, CORRUPTED, new)[1])[0])


def paths_are_their_runs(model, frozen, **options):
    ends = {"senders": ["embed", *model.writes], "receivers": [*model.writes, "logits"]}
    data = rs.path_patching(model, CLEAN, CORRUPTED, METRIC, **ends, frozen=frozen, **options).data.isel(prompt=0)
    steps = {str(site): number for number, step in enumerate(model.steps) for site in step}
    steps |= {"embed": -1, "logits": len(model.steps)}
    for cell in np.ndindex(data.metric.shape):
        here = data.metric[cell]
        sender, receiver = str(here.sender.values), str(here.receiver.values)
        if steps[sender] >= steps[receiver]:
            assert np.isnan(float(here))
            continue
        position = int(here.position) if "position" in here.coords else None
        assert close(float(here), path_by_hand(model, [sender], [receiver], frozen, position))


@pytest.mark.parametrize("options", [{}, {"positions": "each"}], ids=["at once", "each position"])
@pytest.mark.parametrize("frozen", ["all", "attn"])
@pytest.mark.parametrize("case", FEW)
def test_what_is_sent_goes_through_the_trunk(case, frozen, options, forgetful):
    model = EVERYTHING[case]()
    paths_are_their_runs(model, frozen, **options)
    if model.carried:
        forgetful()
        with pytest.raises(AssertionError):
            paths_are_their_runs(model, frozen, **options)


@pytest.mark.parametrize("case", EVERYTHING)
def test_direct_effects_are_one_step_paths(case):
    model = EVERYTHING[case]()
    ends = {"senders": ["embed", *model.writes], "receivers": [*model.writes, "logits"]}
    matrix = rs.direct_effects(model, CLEAN, CORRUPTED, METRIC)
    assert matrix.data.identical(rs.path_patching(model, CLEAN, CORRUPTED, METRIC, **ends).data)
    assert matrix.check.passed
    senders, receivers = ["embed", model.writes[0]], [model.writes[1], model.writes[-1]]
    together = rs.path_patching(model, CLEAN, CORRUPTED, METRIC, senders=[senders], receivers=[receivers])
    assert close(together.data.metric.item(), path_by_hand(model, senders, receivers))


@pytest.mark.parametrize("layout", ["sequential", "parallel"])
def test_through_linear_factors_it_is_their_product(layout, forgetful):
    """A write reaches the logits times the factors of all steps above it, and all writes together move everything."""
    skip, after, layers = -0.7, 1.3, 3
    maps = [((scaled(skip), scaled(after)),) * 2] * layers
    model = LinearToy(random_parts(layers, "linear", seed=30), layout=layout, maps=maps)

    def moved():
        matrix = rs.direct_effects(model, CLEAN, CORRUPTED, METRIC).data.isel(prompt=0)
        return (matrix.metric - matrix.corrupted).sel(receiver="logits"), float(matrix.clean - matrix.corrupted)

    own, other = hand(model, CORRUPTED)[0], hand(model, CLEAN)[0]
    steps, factor = len(model.steps), skip * after
    expected = [difference(model, other["0.resid_pre"] - own["0.resid_pre"])[0] * factor**steps]
    for number, step in enumerate(model.steps, 1):
        moves = [difference(model, other[str(site)] - own[str(site)])[0] for site in step]
        expected += [move * after * factor ** (steps - number) for move in moves]
    found, gap = moved()
    assert close(found.values, expected)
    assert close(float(found.sum()), gap)
    forgetful()
    assert not close(moved()[0].values, expected)


# Stacks of one kind of branch, read and patched


@pytest.mark.parametrize("case", STACKS)
def test_a_stack_of_mlps_is_read_and_patched_like_any_other(case):
    model = STACKS[case]()
    assert model.writes == ("0.mlp", "1.mlp", "2.mlp", "3.mlp")
    assert not rs.read(model, IDS, sites="attn")["2.attn"].any()
    lens = rs.logit_lens(model, IDS, sites="resid_post", targets=0).data
    for layer in range(model.n_layers):
        expected = model.readout(hand(model, IDS)[0][f"{layer}.resid_post"]).log_softmax(-1)[..., 0]
        assert close(lens.log_prob.sel(site=f"{layer}.resid_post").values, expected)
    sites = ["resid_pre", "resid_post", "attn", "mlp"]
    patched = rs.patch_activations(model, CLEAN, CORRUPTED, METRIC, sites=sites, positions="all").data.isel(prompt=0)
    donor = hand(model, CLEAN)[0]
    for site in sites:
        for layer in range(model.n_layers):
            final = hand(model, CORRUPTED, {f"{layer}.{site}": always(donor[f"{layer}.{site}"])})[1]
            assert close(patched.metric.sel(site=site, layer=layer).values, difference(model, final))


@pytest.mark.parametrize("case", STACKS)
def test_the_paths_of_a_stack_of_mlps(case):
    model = STACKS[case]()
    paths = rs.path_lengths(model, IDS, METRIC, samples=20)
    assert paths.check.passed
    assert paths.data["count"].values.tolist() == [comb(4, k) for k in range(5)]
    assert close(paths.data.share.sum("path_length"), 1)
    terms = rs.logit_by_path_length(model, IDS, 0, 1, gauge="jacobian")
    assert terms.check.passed
    assert close(terms.data.logit.values, difference(model, hand(model, IDS)[1]))


@pytest.mark.parametrize("steps", [1, 3])
def test_estimates_of_a_linear_stack_of_mlps_are_patches(steps, monkeypatch):
    model = stack("linear", scaled(0.8), scaled(1.2), make=LinearStack)
    sites = ["resid_pre", "resid_post", "attn", "mlp"]
    exact = rs.patch_activations(model, CLEAN, CORRUPTED, METRIC, sites=sites).data.metric.values

    def estimated():
        return rs.attribution_patching(model, CLEAN, CORRUPTED, METRIC, sites=sites, steps=steps).data.metric.values

    assert close(estimated(), exact)
    honest = slopes.pull_through
    monkeypatch.setattr(slopes, "pull_through", lambda *args: [1.001 * each for each in honest(*args)])
    assert not close(estimated(), exact)


def test_a_branch_that_is_no_part_of_the_trunk_is_not_edited():
    edit = rs.Add("1.attn", torch.ones(4))
    said = r'no write "1.attn" to edit: only .* add to the stream of toy; name one'
    with pytest.raises(SiteError, match=said), rs.edited(STACKS["residual"](), edit):
        pass


# What lets nothing pass


@pytest.mark.parametrize("layout", ["sequential", "parallel"])
def test_a_trunk_that_is_constant_is_one_with_a_factor_of_nothing(layout):
    """Zeros that come from nowhere have no gradient, and are pulled back like the stream times zero, which has."""
    cut, scaled_away = plain_net(3, layout), plain_net(3, layout)
    scaled_away.maps = [((scaled(0.0), same),) * 2] * 3
    sites = ["resid_pre", "attn", "mlp", "resid_post", *(["resid_mid"] if layout == "sequential" else [])]

    def found(model):
        arguments = (model, CLEAN, CORRUPTED, METRIC)
        return [
            rs.path_lengths(model, IDS, METRIC, samples=20, by_branch=True).data.branch_norm,
            rs.logit_by_path_length(model, IDS, 0, 1, gauge="jacobian").data.term,
            rs.attribution_patching(*arguments, sites=sites).data.metric,
            rs.attribution_patching(*arguments, sites=sites, fix="drop").data.metric,
        ]

    for one, other in zip(found(cut), found(scaled_away), strict=True):
        assert one.notnull().any()
        assert np.allclose(one, other, rtol=0, atol=EXACT, equal_nan=True)


# What results say


ASKED = {
    "ablate_layers": lambda model: rs.ablate_layers(model, IDS, metric=METRIC),
    "layer_ensemble": lambda model: rs.layer_ensemble(model, IDS, METRIC),
    "lesion_curve": lambda model: rs.lesion_curve(model, IDS, samples=2),
    "path_patching": lambda model: rs.path_patching(
        model, CLEAN, CORRUPTED, METRIC, senders="mlp", receivers=["logits"]
    ),
    "direct_effects": lambda model: rs.direct_effects(model, CLEAN, CORRUPTED, METRIC),
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_the_trunk_does_is_said_once(asked):
    result = ASKED[asked](CASES["tanh on the trunk"]())
    said = "trunk factors carried at 4 of 8 steps"
    assert result.settings["trunk"] == said
    assert repr(result).count(said) == 1
    plain = ASKED[asked](ToyModel(random_parts(3, "tanh"), maps=[PLAIN] * 3))
    assert "trunk" not in plain.settings
    assert "trunk" not in repr(plain)
