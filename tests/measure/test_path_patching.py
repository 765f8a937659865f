"""Path patching against its four passes done by hand with plain forward hooks, and against ordinary patching."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from measure.test_paths import POSITIONS, ToyModel, random_parts
from models.test_trunk import plant
from stream.test_read import WRITERS, says, unchecked
from tiny import LAYERS, SUPPORTED, blocks_of, state_of, tokenizer

import resstream as rs
from resstream.errors import PromptError, SiteError
from resstream.models.causal_lm import CausalTrunk
from resstream.stream.direct import DirectPaths

NAMES = ("gpt2", "llama", "neox_parallel", "gemma2")
HEADS, D_HEAD = 4, 8
CLEAN = ["w1 w2 w3 w4 w5", "w9 w8 w7"]
CORRUPTED = ["w1 w6 w3 w4 w2", "w9 w4 w7"]
METRIC = rs.logit_diff([4, 5], 7)
SENDERS = ["embed", "0.attn", "0.mlp", "0.head.1", "1.attn", "1.head.3", "1.mlp", ["0.head.0", "1.head.2", "1.mlp"]]
RECEIVERS = [
    "1.q.3",
    "1.k.1",
    "2.v.0",
    "2.q",
    "1.attn",
    "1.mlp",
    "2.mlp",
    "2.head.2",
    ["1.q.1", "2.q.0", "2.k.1"],
    "logits",
]
IOI = (
    "When Mary and John went to the store, John gave a drink to",
    "When Mary and John went to the store, Mary gave a drink to",
)
CLOSE = 1e-5

# The output projection of attention, whose input is the heads side by side, and what returns queries, keys and values.
INNER = {
    "gpt2": ("attn.c_proj", {"q": "attn.c_attn", "k": "attn.c_attn", "v": "attn.c_attn"}),
    "llama": ("self_attn.o_proj", {kind: f"self_attn.{kind}_proj" for kind in "qkv"}),
    "gemma2": ("self_attn.o_proj", {kind: f"self_attn.{kind}_proj" for kind in "qkv"}),
    "neox_parallel": ("attention.dense", dict.fromkeys("qkv", "attention.query_key_value")),
}


def columns_of(name, kind):
    """Where all heads' queries, keys or values are in what their projection returns."""
    which = "qkv".index(kind)
    starts = {
        "gpt2": [which * HEADS * D_HEAD + head * D_HEAD for head in range(HEADS)],
        "neox_parallel": [(3 * head + which) * D_HEAD for head in range(HEADS)],
    }
    return [start + column for start in starts[name] for column in range(D_HEAD)] if name in starts else slice(None)


def one_pass(name, hf_model, ids, changes):
    """Run a Hugging Face model once, under hooks; what each place has is noted before it is changed."""
    seen, handles = {}, []
    output, inner = INNER[name]

    def passed(place, value):
        seen[place] = value.clone()
        return changes[place](value) if place in changes else value

    def enters(layer):
        def hook(_, args, kwargs):
            x = args[0] if args else kwargs["hidden_states"]
            new = passed(f"{layer}.resid_pre", x)
            return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": new})

        return hook

    def leaves(place):
        def hook(_, args, value):
            new = passed(place, value if isinstance(value, torch.Tensor) else value[0])
            return new if isinstance(value, torch.Tensor) else (new, *value[1:])

        return hook

    def projected(layer, kind):
        def hook(_, args, value):
            at = columns_of(name, kind)
            value = value.clone()
            value[..., at] = passed(f"{layer}.{kind}", value[..., at])
            return value

        return hook

    for layer, block in enumerate(blocks_of(hf_model)):
        handles.append(block.register_forward_pre_hook(enters(layer), with_kwargs=True))
        for kind, path in zip(("attn", "mlp"), WRITERS[name], strict=True):
            handles.append(block.get_submodule(path).register_forward_hook(leaves(f"{layer}.{kind}")))
        for kind, path in inner.items():
            handles.append(block.get_submodule(path).register_forward_hook(projected(layer, kind)))
        reads = lambda _, args, layer=layer: (passed(f"{layer}.z", args[0]),)  # noqa: E731
        handles.append(block.get_submodule(output).register_forward_pre_hook(reads))
    try:
        with torch.no_grad():
            logits = hf_model(input_ids=ids, use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    return seen, logits


def first_two(name, hf_model, model, pair):
    """The first two of the four passes of Wang et al.: target and donor as they are; and the target's tokens."""
    target, donor = (model.tokenize(prompt).ids for prompt in pair)
    return target, *(one_pass(name, hf_model, ids, {})[0] for ids in (target, donor))


def by_hand(name, hf_model, runs, sender, receiver, *, frozen="all", positions=slice(None), width=D_HEAD):
    """The logits of one cell, after the other two passes; None where no path leads."""
    target, own, other = runs
    senders, receivers = ([each] if isinstance(each, str) else each for each in (sender, receiver))
    puts = {}
    for each in receivers:
        below = [site for site in senders if stage(name, site) < stage(name, each)]
        if not below:
            continue
        on_path, logits = one_pass(name, hf_model, target, held(own, other, below, frozen, positions, width))
        if each == "logits":
            return logits
        layer, kind, *part = each.split(".")
        some = slice(int(part[0]) * width, (int(part[0]) + 1) * width) if part else slice(None)
        place = f"{layer}.{'z' if kind == 'head' else kind}"
        puts.setdefault(place, own[place].clone())[..., some] = on_path[place][..., some]
    if not puts:
        return None
    above = {}
    for place, value in puts.items():
        moved = value != own[place]
        above[place] = lambda new, value=value, moved=moved: torch.where(moved, value, new)
    return one_pass(name, hf_model, target, above)[1]


def held(own, other, senders, frozen, positions, width):
    """Changes that hold what a run writes, but for senders, which take the other run's value at some positions."""
    kinds = ("attn", "mlp") if frozen == "all" else ("attn",)
    values = {place: own[place] for place in own if place.endswith(kinds)}
    for site in senders:
        layer, kind, *head = site.split(".") if site != "embed" else ("0", "resid_pre")
        place = f"{layer}.{'z' if head else kind}"
        some = slice(int(head[0]) * width, (int(head[0]) + 1) * width) if head else slice(None)
        values[place] = values.get(place, own[place]).clone()
        values[place][:, positions, some] = other[place][:, positions, some]
        if head:
            values.pop(f"{layer}.attn", None)
    return {place: lambda _, value=value: value for place, value in values.items()}


def stage(name, site):
    """How far up a place is, by the steps in which the stream is added to."""
    if site in ("embed", "logits"):
        return -1 if site == "embed" else 99
    layer, kind = site.split(".")[:2]
    return int(layer) if name == "neox_parallel" else 2 * int(layer) + (kind == "mlp")


def difference(logits, row):
    """The metric by hand, from the logits of one prompt."""
    return float(logits[-1, (4, 5)[row]] - logits[-1, 7])


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def hf_model(name):
    return SUPPORTED[name]()


@pytest.fixture(scope="module")
def model(name, hf_model):
    return rs.load(hf_model, name=name, tokenizer=tokenizer())


@pytest.fixture(scope="module")
def toy():
    return rs.load(SUPPORTED["llama"](), name="toy", tokenizer=tokenizer())


def label(end):
    """An end as the result calls it."""
    return end if isinstance(end, str) else "+".join(end)


def the_grid_is_the_four_passes(name, hf_model, model, frozen, direction="noise", close=CLOSE, **options):
    """Every sender by every receiver."""
    senders, receivers = options.get("senders", SENDERS), options.get("receivers", RECEIVERS)
    result = rs.path_patching(
        model, CLEAN, CORRUPTED, METRIC, senders=senders, receivers=receivers, frozen=frozen, direction=direction
    )
    assert result.data.metric.dims == ("prompt", "sender", "receiver")
    assert list(result.data.sender.values) == list(map(label, senders))
    assert list(result.data.receiver.values) == list(map(label, receivers))
    sides = (CLEAN, CORRUPTED) if direction == "noise" else (CORRUPTED, CLEAN)
    moved = 0.0
    runs = [first_two(name, hf_model, model, pair) for pair in zip(*sides, strict=True)]
    for row, (s, sender), (r, receiver) in product(range(len(CLEAN)), enumerate(senders), enumerate(receivers)):
        logits = by_hand(name, hf_model, runs[row], sender, receiver, frozen=frozen)
        found = float(result.data.metric[row, s, r])
        if logits is None:
            assert np.isnan(found), (sender, receiver)
        else:
            expected = difference(logits, row)
            assert abs(found - expected) < close, (sender, receiver)
            base = float(result.data.clean[row] if direction == "noise" else result.data.corrupted[row])
            moved = max(moved, abs(expected - base))
    assert moved > 0.01, "and patches do something"
    assert result.check.passed


@pytest.mark.parametrize("frozen", ["all", "attn"])
def test_the_grid_is_the_four_passes(frozen, name, hf_model, model):
    """Every kind of sender and receiver, pairs of unequal length; post-norms are the model's own on both sides."""
    the_grid_is_the_four_passes(name, hf_model, model, frozen)


def test_denoising_is_the_four_passes_the_other_way_round(name, hf_model, model):
    the_grid_is_the_four_passes(name, hf_model, model, "all", "denoise", senders=SENDERS[:4], receivers=RECEIVERS[-3:])


@pytest.mark.parametrize("name", ["gpt2"], indirect=True)
def test_float64_is_exact(name):
    hf_model = SUPPORTED[name]().double()
    model = rs.load(hf_model, name=name, tokenizer=tokenizer())
    the_grid_is_the_four_passes(name, hf_model, model, "attn", close=1e-10)


@pytest.mark.parametrize("case", ["not frozen", "wrong run", "write is off"])
def test_a_planted_error_is_noticed(case, toy, monkeypatch):
    """The twin of the tests above."""
    if case == "not frozen":
        monkeypatch.setattr(
            DirectPaths, "frozen", property(lambda self: "attn", lambda self, value: None), raising=False
        )
    elif case == "wrong run":
        honest = DirectPaths._own
        monkeypatch.setattr(DirectPaths, "_own", lambda self, site, numbers, run="target": honest(self, site, numbers))
    else:
        plant(monkeypatch, CausalTrunk, "write", "attn")
    with pytest.raises(AssertionError):
        the_grid_is_the_four_passes("llama", toy.hf_model, toy, "all")


@pytest.mark.parametrize(("frozen", "positions"), [("all", "each"), ("attn", [-1, 1])])
def test_senders_at_some_positions(frozen, positions, name, hf_model, model):
    senders, receivers = ["embed", "0.mlp", "1.head.3"], ["2.q.0", "2.k.1", "2.attn", "2.head.2", "2.mlp", "logits"]
    ends = {"senders": senders, "receivers": receivers, "frozen": frozen, "direction": "noise"}
    data = rs.path_patching(model, CLEAN, CORRUPTED, METRIC, positions=positions, **ends).data
    assert data.metric.dims == ("prompt", "sender", "receiver", "position")
    runs = first_two(name, hf_model, model, (CLEAN[0], CORRUPTED[0]))
    for (s, sender), (r, receiver), (column, place) in product(
        enumerate(senders), enumerate(receivers), enumerate(data.position.values)
    ):
        logits = by_hand(name, hf_model, runs, sender, receiver, frozen=frozen, positions=[int(place)])
        assert abs(float(data.metric[0, s, r, column]) - difference(logits, 0)) < CLOSE, (sender, receiver, place)
    if positions == "each":
        assert data.metric[1, :, :, 3:].isnull().all(), "the second prompt has three tokens"
        assert (data.metric[0, :, :, 0] == data.clean[0]).all(), "nothing differs at the first token"


EVERY_WRITE = ["embed", *(f"{layer}.{kind}" for layer in range(LAYERS) for kind in ("attn", "mlp"))]


@pytest.mark.parametrize(("direction", "frozen"), [("denoise", "all"), ("noise", "attn")])
def test_all_senders_together_are_ordinary_patching(direction, frozen, model):
    """A receiver that hears everything from the other run has the value which it has there."""
    ends = {"senders": [EVERY_WRITE], "direction": direction, "frozen": frozen}
    kinds = ("attn", "mlp")
    data = rs.path_patching(model, CLEAN, CORRUPTED, METRIC, receivers=[*EVERY_WRITE[1:], "logits"], **ends).data
    whole = rs.patch_activations(
        model, CLEAN, CORRUPTED, METRIC, sites=kinds, positions="all", direction=direction
    ).data.metric
    for layer, kind in product(range(LAYERS), kinds):
        found = data.metric.sel(receiver=f"{layer}.{kind}").values[:, 0]
        assert np.abs(found - whole.sel(layer=layer, site=kind).values).max() < CLOSE
    assert np.abs(data.effect.sel(receiver="logits").values - 1).max() < 1e-4


def test_all_senders_together_are_ordinary_patching_inside_attention(model):
    ends = {"senders": [EVERY_WRITE], "receivers": ["q", "k", "v", "head"]}
    found = rs.path_patching(model, CLEAN, CORRUPTED, METRIC, **ends).data.metric[:, 0]
    for kind in ("q", "k", "v", "head"):
        heads = rs.patch_activations(model, CLEAN, CORRUPTED, METRIC, sites=kind, positions="all").data.metric
        for layer, head in product(range(LAYERS), range(heads.sizes["head"])):
            expected = heads.sel(layer=layer, head=head).values[:, 0]
            assert np.abs(found.sel(receiver=f"{layer}.{kind}.{head}").values - expected).max() < CLOSE


class LinearToy(ToyModel):
    """A toy whose readout is linear too, so that the whole network is."""

    def readout(self, x, vocab=None):
        logits = x @ self.head
        return logits if vocab is None else logits[..., list(vocab)]


TOY_PAIR = torch.tensor([[1, 2, 3, 4][:POSITIONS]]), torch.tensor([[1, 5, 0, 2][:POSITIONS]])


@pytest.mark.parametrize("layout", ["sequential", "parallel"])
def test_direct_effects_of_a_linear_net_add_up(layout):
    """To the whole change at the logits, and at each write to what patching that write does."""
    net = LinearToy(random_parts(3, "linear"), layout=layout)
    matrix = rs.direct_effects(net, *TOY_PAIR, rs.logit_diff(0, 1)).data
    assert matrix.effect.shape == (1, 7, 7)
    matrix = matrix.isel(prompt=0)
    sums = (matrix.metric - matrix.corrupted).sum("sender")
    assert float(sums.sel(receiver="logits")) == pytest.approx(float(matrix.clean - matrix.corrupted), abs=1e-10)
    patched = rs.patch_activations(net, *TOY_PAIR, rs.logit_diff(0, 1), sites=["attn", "mlp"], positions="all").data
    patched = patched.isel(prompt=0)
    for layer, kind in product(range(3), ("attn", "mlp")):
        whole = float(patched.metric.sel(layer=layer, site=kind) - patched.corrupted)
        assert float(sums.sel(receiver=f"{layer}.{kind}")) == pytest.approx(whole, abs=1e-10)


def test_direct_effects_of_another_net_do_not():
    """The twin of the test above."""
    net = ToyModel(random_parts(3, "tanh"))
    matrix = rs.direct_effects(net, *TOY_PAIR, rs.logit_diff(0, 1)).data.isel(prompt=0)
    sums = (matrix.metric - matrix.corrupted).sum("sender")
    assert abs(float(sums.sel(receiver="logits") - (matrix.clean - matrix.corrupted))) > 1e-4


def test_direct_effects_are_path_patching(model):
    ends = {"senders": EVERY_WRITE, "receivers": [*EVERY_WRITE[1:], "logits"]}
    paths = rs.path_patching(model, CLEAN, CORRUPTED, METRIC, **ends).data
    matrix = rs.direct_effects(model, CLEAN, CORRUPTED, METRIC)
    assert matrix.data.identical(paths)
    defined = matrix.data.metric[0].notnull().values
    if model.layout == "sequential":
        assert (defined == np.triu(np.ones((7, 7), dtype=bool))).all()
    by_head = rs.direct_effects(model, CLEAN, CORRUPTED, METRIC, by="head").data
    assert by_head.sizes["sender"] == by_head.sizes["receiver"] == 1 + LAYERS * (HEADS + 1)
    some = rs.direct_effects(model, CLEAN, CORRUPTED, METRIC, layers=[2, 1]).data
    kept = {"sender": list(some.sender.values), "receiver": list(some.receiver.values)}
    assert kept["sender"] == ["embed", "1.attn", "1.mlp", "2.attn", "2.mlp"]
    assert np.nanmax(np.abs(some.metric - matrix.data.metric.sel(kept))) < CLOSE
    same = {"sender": ["embed", "0.mlp", "2.mlp"], "receiver": ["1.mlp", "2.mlp", "logits"]}
    assert np.nanmax(np.abs(by_head.metric.sel(same) - matrix.data.metric.sel(same))) < CLOSE


def test_smollm2_is_the_four_passes(smollm2):
    """Heads to the logits, and to the queries of a later head with the MLPs between at work, as in the paper."""
    mary, john = (smollm2.tokenizer(name)["input_ids"][0] for name in (" Mary", " John"))
    runs = first_two("llama", smollm2.hf_model, smollm2, IOI)
    metric = rs.logit_diff(" Mary", " John")
    for frozen, receiver in (("all", "logits"), ("attn", "22.q.3")):
        senders = ["20.head.4", "14.mlp"]
        data = rs.path_patching(
            smollm2, *IOI, metric, senders=senders, receivers=receiver, frozen=frozen, direction="noise"
        ).data
        for number, sender in enumerate(senders):
            logits = by_hand("llama", smollm2.hf_model, runs, sender, receiver, frozen=frozen, width=64)
            expected = float(logits[-1, mary] - logits[-1, john])
            assert abs(float(data.metric[0, number, 0]) - expected) < 2e-4


def test_pairs_together_are_pairs_alone(toy):
    ends = {"senders": ["embed", "head"], "receivers": ["attn", "q", "logits"], "positions": "each"}
    together = rs.path_patching(toy, CLEAN, CORRUPTED, METRIC, **ends).data
    for row in range(2):
        alone = rs.path_patching(toy, CLEAN[row], CORRUPTED[row], METRIC.take([row]), **ends).data
        width = alone.sizes["position"]
        assert np.nanmax(np.abs(together.metric[row, ..., :width].values - alone.metric[0].values)) < 1e-6


def test_little_memory_changes_nothing(toy):
    ends = {"senders": ["embed", "head", ["0.mlp", "1.mlp"]], "receivers": ["attn", ["1.q", "2.k"], "logits"]}
    much = rs.path_patching(toy, CLEAN, CORRUPTED, METRIC, **ends).data.metric
    little = rs.path_patching(toy, CLEAN, CORRUPTED, METRIC, memory=2**17, **ends).data.metric
    assert np.nanmax(np.abs(much - little)) < 1e-6
    assert (much.isnull() == little.isnull()).all()


def test_a_repeated_sweep_is_bit_equal(toy):
    ends = {"senders": ["embed", "head"], "receivers": ["attn", "mlp", "q"]}
    first = rs.path_patching(toy, CLEAN, CORRUPTED, METRIC, **ends).data
    assert rs.path_patching(toy, CLEAN, CORRUPTED, METRIC, **ends).data.identical(first)


def test_equal_prompts_have_no_effect(toy):
    with pytest.warns(UserWarning, match="same metric"):
        data = rs.path_patching(toy, CLEAN, CLEAN, METRIC, senders="head", receivers="logits").data
    assert (data.metric == data.clean).all()
    assert data.effect.isnull().all()


def test_what_the_result_says(toy, tmp_path):
    result = rs.path_patching(toy, CLEAN, CORRUPTED, METRIC, senders=["head", "embed"], receivers=["2.q.1", "logits"])
    assert (result.measure, result.model) == ("path_patching", "toy")
    assert result.settings["frozen"] == "all"
    assert result.settings["direction"] == "denoise"
    best = result.data.mean_effect.isel(result.data.mean_effect.argmax(...))
    assert f"{best.sender.item()} to {best.receiver.item()}" in result.headline
    opened = rs.open_result(result.save(tmp_path / "paths"))
    assert opened.data.identical(result.data)


def test_the_model_is_as_it_was(name):
    hf_model = SUPPORTED[name]().train()
    model = rs.load(hf_model, tokenizer=tokenizer())
    before = state_of(hf_model)
    rs.path_patching(model, CLEAN, CORRUPTED, METRIC, senders=["embed", "head"], receivers=["q", "attn", "logits"])
    assert state_of(hf_model) == before


# Errors

WRONG = {
    "boundary": ({"senders": "1.resid_post"}, SiteError, '"1.resid_post" is not a sender', 'such as "embed", "5.attn"'),
    "query": ({"senders": ["0.q.1"]}, SiteError, '"0.q.1" is not a sender', "name what writes to the stream"),
    "z": ({"receivers": "1.z.1"}, SiteError, '"1.z.1" is not a receiver', '"5.q.0"'),
    "layer": ({"senders": "7.mlp"}, SiteError, 'no site "7.mlp"', "layers 0-2", 'did you mean "2.mlp"?'),
    "head": ({"receivers": "1.k.2"}, SiteError, 'no site "1.k.2"', "key/value heads 0-1", 'did you mean "1.k.1"?'),
    "no sender": ({"senders": []}, SiteError, "a sender is missing"),
    "no receiver": ({"receivers": [[]]}, SiteError, "a receiver is missing"),
    "no path": (
        {"senders": ["2.mlp", "1.mlp"], "receivers": ["0.q", "1.mlp"]},
        SiteError,
        "no path leads",
        'the lowest sender is "1.mlp"',
        'the highest receiver, "1.mlp"',
    ),
    "whole and part": ({"receivers": [["1.attn", "1.q.0"]]}, SiteError, '"1.attn" and "1.q.0" cannot be one receiver'),
    "all and one": ({"receivers": [["1.q", "1.q.0"]]}, SiteError, '"1.q" and "1.q.0" cannot be one receiver'),
    "logits and more": ({"receivers": [["1.q", "logits"]]}, SiteError, '"logits" cannot be patched together'),
    "frozen": ({"frozen": "mlp"}, SiteError, 'frozen="mlp"', 'write "all" or "attn"'),
    "direction": ({"direction": "both"}, SiteError, 'direction="both"', 'write "denoise" or "noise"'),
    "positions": ({"positions": [4]}, PromptError, "no position 4", "prompt 1 has 3 tokens"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_choice(case, toy):
    options, kind, *parts = WRONG[case]
    with unchecked(), pytest.raises(kind) as error:
        rs.path_patching(toy, CLEAN, CORRUPTED, METRIC, **{"senders": "head", "receivers": "logits", **options})
    assert says(error, *parts)


def test_prompts_of_different_lengths(toy):
    with pytest.raises(PromptError, match="does not align"):
        rs.path_patching(toy, CLEAN, CORRUPTED[::-1], METRIC, senders="head", receivers="logits")
    with unchecked(), pytest.raises(SiteError, match='by="layer"'):
        rs.direct_effects(toy, CLEAN, CORRUPTED, METRIC, by="layer")
