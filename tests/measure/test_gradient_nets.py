"""Attribution patching on nets with known answers: linear ones, and ones that bend at a single place."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from measure.test_gradients import agree, changes, off_by_a_thousandth
from measure.test_paths import POSITIONS, ToyModel, ToyTrunk, branch, random_parts, same, scaled

import resstream as rs
from resstream.errors import SiteError, UnsupportedModelError
from resstream.models.tokens import Tokens
from resstream.sites import Site
from resstream.stream import slopes

EXACT = 1e-10  # float64
TARGETS = torch.tensor([[0, 1, 2], [3, 2, 5]])
DONORS = torch.tensor([[0, 4, 5], [1, 2, 0]])
ANSWERS = rs.logit_diff([0, 2], 1)
STREAM = ["resid_pre", "resid_mid", "resid_post", "attn", "mlp"]


class LinearToy(ToyModel):
    """A toy whose readout is linear too."""

    def readout(self, x, vocab=None):
        logits = x @ self.head
        return logits if vocab is None else logits[..., list(vocab)]


@pytest.mark.parametrize("layout", ["sequential", "parallel"])
@pytest.mark.parametrize("direction", ["denoise", "noise"])
@pytest.mark.parametrize("steps", [1, 5])
def test_on_a_linear_net_estimates_are_patches(steps, direction, layout, monkeypatch):
    model = LinearToy(random_parts(3, "linear"), layout)
    sites = [kind for kind in STREAM if kind != "resid_mid" or layout == "sequential"]
    arguments = (model, DONORS, TARGETS, ANSWERS)
    exact = changes(rs.patch_activations(*arguments, sites=sites, direction=direction))
    found = rs.attribution_patching(*arguments, sites=sites, direction=direction, steps=steps)
    agree(changes(found), exact, close=EXACT)
    if steps > 1:
        assert np.abs(found.data.completeness).max() < EXACT * np.abs(exact).max()
    off_by_a_thousandth(monkeypatch, slopes, "pull_through")
    planted = rs.attribution_patching(*arguments, sites=sites, direction=direction, steps=steps)
    with pytest.raises(AssertionError):
        agree(changes(planted), exact, close=EXACT)


def run_by_hand(model, ids, stopped=None):
    """A toy's run, with every value in the graph; the branches of one layer may hold still."""
    values = {"0.resid_pre": model.embedding[ids].clone().requires_grad_()}
    x = values["0.resid_pre"]

    def written(layer, kind, part, x):
        value = part(x)
        values[f"{layer}.{kind}"] = value = value.detach().requires_grad_() if layer == stopped else value.clone()
        return value.detach() if layer == stopped else value

    for layer, ((attn, mlp), ((before, after), (before_mlp, after_mlp))) in enumerate(
        zip(model.branches, model.maps, strict=True)
    ):
        values[f"{layer}.resid_pre"] = x
        if model.layout == "parallel":
            x = after(before(x) + written(layer, "attn", attn, x) + written(layer, "mlp", mlp, x))
        else:
            x = values[f"{layer}.resid_mid"] = after(before(x) + written(layer, "attn", attn, x)).clone()
            x = after_mlp(before_mlp(x) + written(layer, "mlp", mlp, x))
        x = values[f"{layer}.resid_post"] = x.clone()
    return values, model.readout(x)


CARRIED = ((scaled(0.7), torch.tanh), (torch.sin, scaled(1.3)))
TOYS = {
    "sequential": ToyModel(random_parts(3, "tanh", 1)),
    "parallel": ToyModel(random_parts(3, "tanh", 2), "parallel"),
    "carried": ToyModel(random_parts(3, "tanh", 3), maps=[CARRIED] * 3),
    "carried parallel": ToyModel(random_parts(3, "tanh", 4), "parallel", maps=[CARRIED] * 3),
}


def sizes_by_hand(model, target, donor, row, kind, layer):
    """L runs, in each of which one layer's branches hold still; sizes over the passes that leave the site in place.

    One for each position, and one for all of them together.
    """
    site, answer = f"{layer}.{kind}", (0, 2)[row]
    move = run_by_hand(model, donor)[0][site] - run_by_hand(model, target)[0][site]
    total = 0
    for stopped in range(model.n_layers):
        values, logits = run_by_hand(model, target, stopped)
        score = logits[-1, answer] - logits[-1, 1]
        (slope,) = torch.autograd.grad(score, values[site], allow_unused=True)
        by_position = torch.zeros(POSITIONS) if slope is None else (move * slope).sum(-1)
        total = total + torch.cat([by_position, by_position.sum(0, keepdim=True)]).abs()
    return (total / (model.n_layers - (kind in ("attn", "mlp")))).detach().numpy()


@pytest.mark.parametrize("toy_name", TOYS)
@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_dropped_layers_are_the_naive_loop(direction, toy_name, monkeypatch):
    """Also where the trunk does something to the stream itself, which dropped branches leave in place."""
    model = TOYS[toy_name]
    sites = [kind for kind in STREAM if kind != "resid_mid" or model.layout == "sequential"]
    clean, corrupted = (DONORS, TARGETS) if direction == "denoise" else (TARGETS, DONORS)

    def dropped(**choice):
        return rs.attribution_patching(
            model, clean, corrupted, ANSWERS, sites=sites, direction=direction, fix="drop", **choice
        )

    by_hand_ = [
        sizes_by_hand(model, TARGETS[row], DONORS[row], row, kind, layer)
        for row, kind, layer in product(range(2), sites, range(model.n_layers))
    ]
    *each, together = np.moveaxis(np.array(by_hand_).reshape(2, len(sites), model.n_layers, -1), -1, 0)
    expected = np.stack(each, axis=-1)
    result, whole = dropped(), dropped(positions="all")
    sides = ("corrupted", "clean") if direction == "denoise" else ("clean", "corrupted")
    start, end = (result.data[side].values for side in sides)
    gap = np.abs(end - start)
    assert (result.data.effect >= 0).all()
    assert np.abs(result.data.effect.values - expected / gap[:, None, None, None]).max() < EXACT
    assert np.abs(whole.data.effect.values - together / gap[:, None, None]).max() < EXACT
    agree(np.abs(changes(result)), expected[:, :, :, None], close=EXACT)
    assert np.abs(result.data.mean_effect.values - expected.sum(0) / gap.sum()).max() < EXACT
    assert "no sign" in result.settings["sign"]
    assert "completeness" not in result.data
    honest = slopes._past
    monkeypatch.setattr(slopes, "_past", lambda *args: {kind: 1.001 * each for kind, each in honest(*args).items()})
    with pytest.raises(AssertionError):
        agree(np.abs(changes(dropped())), expected[:, :, :, None], close=EXACT)


def test_dropping_shows_ways_that_cancel():
    """A write that a later layer takes back has no slope; with that layer dropped it has one."""
    upper = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    write, take_back, nothing = (lambda x: upper * x.roll(2, -1)), (lambda x: -upper * x), scaled(0.0)
    model = LinearToy([(write, nothing), (take_back, nothing), (nothing, nothing)])
    plain, sizes = (
        rs.attribution_patching(model, DONORS, TARGETS, ANSWERS, sites="attn", layers=0, fix=fix)
        for fix in (None, "drop")
    )
    assert np.abs(changes(plain)).max() < EXACT
    whole = run_by_hand(model, DONORS)[0]["0.attn"] - run_by_hand(model, TARGETS)[0]["0.attn"]
    slope = model.head[:, [0, 2]].T - model.head[:, 1]
    expected = (whole[:, -1] * slope).sum(-1).abs() / 2
    assert np.abs(np.abs(changes(sizes))[:, 0, 0, 0, -1] - expected.detach().numpy()).max() < EXACT


class AttentionTrunk(ToyTrunk):
    """Heads, two of queries and one of keys and values, in a net in which only the pattern is not linear."""

    def layer(self, layer, x, inside=None):
        x = x + self.write(Site(layer, "attn"), x, inside)
        return x + self.write(Site(layer, "mlp"), x)

    def write(self, site, x, inside=None):
        inside = inside or {}
        if site.kind == "mlp":
            return super().write(site, x)
        weights = self.model.weights[site.layer]
        q, k, v = ((x @ weights[kind]).unflatten(-1, (-1, 2)) for kind in "qkv")
        q, k, v = (inside.get(kind, same)(value) for kind, value in zip("qkv", (q, k, v), strict=True))
        scores = torch.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) * self.model.sharpness
        hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        pattern = inside.get("pattern", same)(scores.masked_fill(hidden, -torch.inf).softmax(-1))
        z = inside.get("z", same)(torch.einsum("bhqk,bkd->bqhd", pattern, v[:, :, 0]))
        return z.flatten(2) @ weights["o"]


class AttentionToy(LinearToy):
    """Two layers of attention and a linear MLP each, without norms."""

    n_heads = 2

    @property
    def parts(self):
        return {"q": 2, "k": 1, "v": 1, "z": 2, "head": 2, "pattern": 2}

    def __init__(self, sharpness, seed=3):
        super().__init__([(same, branch("linear", False, 7 + layer)) for layer in range(2)])
        self.sharpness = sharpness
        rng = torch.Generator().manual_seed(seed)
        shapes = {"q": (4, 4), "k": (4, 2), "v": (4, 2), "o": (4, 4)}
        self.weights = [
            {kind: torch.randn(shape, dtype=torch.float64, generator=rng) for kind, shape in shapes.items()}
            for _ in range(2)
        ]

    @property
    def checks_inside(self):
        return dict.fromkeys(self.parts, self.check)

    def trunk(self, tokens):
        return AttentionTrunk(self, tokens)


def queries_by_hand(model, kind):
    """What each head's query or key of the last layer changes, put in at one position, in two plain runs."""
    found = np.zeros((2, {"q": 2, "k": 1}[kind], POSITIONS))
    for row in range(2):
        (x, own), (_, other) = (last_layer(model, ids[row], kind) for ids in (TARGETS, DONORS))
        for head, position in product(range(found.shape[1]), range(POSITIONS)):
            put = own.clone()
            put[0, position, head] = other[0, position, head]
            trunk = model.trunk(tokens_of(TARGETS[row]))
            ends = [model.readout(trunk.layer(1, x, {kind: lambda _, put=put: put})[0, -1]) for put in (put, own)]
            change = ends[0] - ends[1]
            found[row, head, position] = change[(0, 2)[row]] - change[1]
    return found


def last_layer(model, ids, kind):
    """What the last layer reads, and its queries or keys."""
    trunk, seen = model.trunk(tokens_of(ids)), []
    x = trunk.layer(0, trunk.x0)
    trunk.layer(1, x, {kind: lambda value: seen.append(value) or value})
    return x, seen[0]


def tokens_of(ids):
    return Tokens(ids[None], (len(ids),), ())


@pytest.mark.parametrize("kind", ["q", "k"])
def test_where_only_the_softmax_bends_the_fix_is_exact(kind):
    model = AttentionToy(1.0)
    expected = queries_by_hand(model, kind)
    plain, fixed = (
        rs.attribution_patching(model, DONORS, TARGETS, ANSWERS, sites=kind, layers=1, fix=fix) for fix in (None, "qk")
    )
    agree(changes(fixed)[:, 0, 0], expected, close=EXACT)
    exact = rs.patch_activations(model, DONORS, TARGETS, ANSWERS, sites=kind, layers=1)
    agree(changes(exact)[:, 0, 0], expected, close=EXACT)
    assert np.abs(changes(plain)[:, 0, 0] - expected).max() > 0.1 * np.abs(expected).max(), "and the plain one is not"


@pytest.mark.parametrize("kind", ["q", "k"])
def test_a_saturated_softmax_hides_nothing(kind):
    model = AttentionToy(50.0, seed=9)
    expected = queries_by_hand(model, kind)
    plain, fixed = (
        changes(rs.attribution_patching(model, DONORS, TARGETS, ANSWERS, sites=kind, layers=1, fix=fix))[:, 0, 0]
        for fix in (None, "qk")
    )
    assert np.abs(expected).max() > 0.5
    assert np.abs(plain).max() < 1e-3
    agree(fixed, expected, close=EXACT)


def test_one_layer_has_none_to_drop():
    model = LinearToy(random_parts(1, "linear"))
    with pytest.raises(SiteError, match="has just the one"):
        rs.attribution_patching(model, DONORS, TARGETS, ANSWERS, sites="attn", fix="drop")
    with pytest.raises(UnsupportedModelError, match='"z"'):
        rs.attribution_patching(model, DONORS, TARGETS, ANSWERS, sites="z")
