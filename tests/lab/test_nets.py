"""Toy nets: their inside against plain arithmetic, their certificates against tampering, and sizes that make none."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from lab.small_nets import CASES, small_mlp, small_transformer, worn
from stream.test_read import unchecked

import resstream as rs
from resstream import lab
from resstream.errors import LabError, UnsupportedModelError
from resstream.models.carry import Carry

EXACT = 1e-12
IDS = torch.tensor([[1, 2, 5], [4, 0, 3]])
INSIDE = ("q", "k", "v", "pattern", "z", "neuron")


def inside_by_hand(net, layer, x, kind):
    """What is inside the first or the second branch of a plain residual layer that reads x, position by position."""
    w, heads = net.of(f"{layer}.{kind}"), net.n_heads
    if kind == "mlp":
        return {"neuron": torch.tanh(x @ w["in"] + w["in.bias"])}
    size = net.d_model // heads
    shape = (*x.shape[:2], heads, size)
    found = {name: torch.zeros(shape, dtype=x.dtype) for name in ("q", "k", "v", "z")}
    found["pattern"] = torch.zeros(len(x), heads, x.shape[1], x.shape[1], dtype=x.dtype)
    found["head"] = torch.zeros(*x.shape[:2], heads, net.d_model, dtype=x.dtype)
    for row in range(len(x)):
        for head in range(heads):
            rows = slice(head * size, (head + 1) * size)
            for name in ("q", "k", "v"):
                found[name][row, :, head] = x[row] @ w[name][:, rows]
            q, k, v = (found[name][row, :, head] for name in ("q", "k", "v"))
            for query in range(x.shape[1]):
                raised = torch.stack([torch.exp(q[query] @ k[key] / math.sqrt(size)) for key in range(query + 1)])
                found["pattern"][row, head, query, : query + 1] = raised / raised.sum()
                found["z"][row, query, head] = (raised / raised.sum()) @ v[: query + 1]
            found["head"][row, :, head] = found["z"][row, :, head] @ w["o"][rows]
    return found


@pytest.fixture(scope="module")
def net():
    """A worn stack of attention and MLPs, added as they are."""
    return worn(small_transformer("residual"))


def test_what_is_inside_branches_is_plain_arithmetic(net):
    seen = rs.read(net, IDS, sites=["resid_pre", "resid_mid", "resid_post", "attn", "mlp", "head", *INSIDE])
    x = net.weights["ends.embed"][IDS]
    for layer in range(net.n_layers):
        attn = inside_by_hand(net, layer, x, "attn")
        written = attn["head"].sum(2)
        middle = x + written
        neurons = inside_by_hand(net, layer, middle, "mlp")
        w = net.of(f"{layer}.mlp")
        mlp = neurons["neuron"] @ w["out"] + w["out.bias"]
        states = {"resid_pre": x, "attn": written, "resid_mid": middle, "mlp": mlp, "resid_post": middle + mlp}
        for kind, expected in {**attn, **neurons, **states}.items():
            assert (seen[f"{layer}.{kind}"] - expected).abs().max() < EXACT, kind
        x = middle + mlp
    assert (seen.logits - x @ net.weights["ends.unembed"]).abs().max() < EXACT


@pytest.mark.parametrize("kind", ["q", "k", "v", "pattern", "z", "head", "neuron"])
def test_an_edit_inside_a_branch_is_plain_arithmetic(net, kind):
    """A value is halved in layer 1, and the branch goes on from it by hand."""
    with rs.edited(net, rs.Scale(f"1.{kind}.1", 0.5)) as edited:
        found = edited.logits(IDS)
    x = net.trunk(net.tokenize(IDS)).layer(0, net.weights["ends.embed"][IDS])
    w, seen = net.of("1.attn"), inside_by_hand(net, 1, x, "attn")
    axis = 1 if kind == "pattern" else 2
    if kind in seen:
        seen[kind].select(axis, 1).mul_(0.5)
    if kind in ("q", "k"):
        for row, head, query in [(r, h, q) for r in range(2) for h in range(net.n_heads) for q in range(3)]:
            scores = seen["k"][row, : query + 1, head] @ seen["q"][row, query, head] / math.sqrt(4)
            seen["pattern"][row, head, query, : query + 1] = scores.exp() / scores.exp().sum()
    if kind in ("q", "k", "v", "pattern"):
        seen["z"] = torch.einsum("bhqk,bkhd->bqhd", seen["pattern"], seen["v"])
    x = x + (seen["head"].sum(2) if kind == "head" else seen["z"].flatten(2) @ w["o"])
    w, neurons = net.of("1.mlp"), inside_by_hand(net, 1, x, "mlp")["neuron"]
    if kind == "neuron":
        neurons[..., 1] *= 0.5
    x = net.trunk(net.tokenize(IDS)).layer(2, x + neurons @ w["out"] + w["out.bias"])
    assert (found - x @ net.weights["ends.unembed"]).abs().max() < EXACT


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("build", [small_mlp, small_transformer])
def test_a_net_is_certified(build, case):
    net = worn(build(CASES[case]))
    assert net.check.passed
    assert net.check.error < EXACT
    failed = {kind for kind, check in net.checks_inside.items() if not check.passed}
    # The gate looks at the stream, which a head by itself does not have: what it adds is not known from its z.
    assert failed == ({"head"} if case == "gated_skip" and build is small_transformer else set())


def test_heads_behind_a_gate_are_refused_and_their_z_is_not():
    net = worn(small_transformer("gated_skip"))
    with pytest.raises(UnsupportedModelError, match=r'where "head" is inside .* could not be proved'):
        rs.read(net, IDS, sites="head")
    assert rs.read(net, IDS, sites="z")["1.z"].shape == (2, 3, 2, 4)


@pytest.mark.parametrize("case", ["post_ln", "sandwich_ln", "layer_scale", "fixup", "ada_ln", "stochastic_depth"])
def test_heads_sum_to_the_write_but_for_what_does_not_depend_on_them(case):
    """A head is what its write loses without it, with the scale of a norm behind the branch held fixed."""
    net = worn(small_transformer(CASES[case]))
    trunk = net.trunk(net.tokenize(IDS))
    x, kept = trunk.layer(0, trunk.x0), {}
    site = net.site("1.attn")
    whole = trunk.write(site, x, {"z": lambda z: kept.setdefault("z", z)})
    heads, w = trunk.head_writes(1, kept["z"]), trunk.prepared[site]
    if case == "sandwich_ln":
        y = kept["z"].flatten(2) @ w["o"]
        scale = (y.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
        parts = torch.einsum("bphd,hdm->bphm", kept["z"], w["o"].unflatten(0, (2, 4)))
        expected = (parts - parts.mean(-1, keepdim=True)) * scale[:, :, None] * w["second.weight"]
        assert (heads - expected).abs().max() < EXACT
    else:
        for head in range(2):
            alone = kept["z"].clone()
            alone[:, :, head] = 0
            lost = whole - trunk.write(site, x, {"z": lambda _, alone=alone: alone})
            assert (heads[:, :, head] - lost).abs().max() < EXACT


@dataclass(frozen=True)
class Forgetful(lab.Rule):
    """A rule whose trunk depends on the batch, which a step on its own does not know."""

    def prepare(self, weights, place, batch):
        return {**weights, "scale": torch.tensor(0.5)}

    def carry(self, weights, place):
        return Carry(before=lambda x: weights.get("scale", 1.0) * x)


class Tampered(lab.Net):
    """A net that opens another stream than it runs."""

    def trunk(self, tokens, **options):
        return replace(super().trunk(tokens), tokens=replace(tokens, ids=tokens.ids.flip(0)))


@dataclass(frozen=True)
class Shifted(lab.Branch):
    """A perceptron that says it has other neurons than it uses."""

    matrices: int = 2

    def start(self, width, rng, gain):
        return lab.Perceptron(5).start(width, rng, gain)

    def apply(self, x, weights, mask, inside):
        shown = {kind: lambda value, see=see: see(1.001 * value) / 1.001 for kind, see in inside.items()}
        return lab.Perceptron(5).apply(x, weights, mask, shown)

    def parts(self, width):
        return {"neuron": 5}


def test_tampering_fails_the_certificate():
    honest = small_mlp("residual")
    assert not Tampered(honest.design, honest.weights).check.passed
    forgetful = small_mlp(Forgetful())
    assert not forgetful.check.passed
    assert forgetful.check.where == "steps"
    assert not rs.path_lengths(forgetful, IDS, rs.logit_diff(1, 2)).check.passed


def test_a_branch_that_shows_other_values_than_it_uses_is_refused():
    net = small_mlp("residual", branch=Shifted())
    assert net.check.passed
    assert not net.check_inside.passed
    with pytest.raises(UnsupportedModelError, match=r'where "neuron" is inside .* could not be proved'):
        rs.read(net, IDS, sites="neuron")


def test_a_net_in_another_type_is_itself_rounded():
    net = worn(small_transformer("post_ln"))
    narrow = net.in_dtype(torch.float32)
    assert narrow.dtype == torch.float32
    assert narrow.check.passed
    assert narrow.check_inside.passed
    error = (narrow.logits(IDS).double() - net.logits(IDS)).abs().max()
    assert 1e-9 < error < 1e-4
    assert torch.equal(narrow.in_float64().weights["1.attn.q"], net.weights["1.attn.q"].float().double())


@pytest.mark.parametrize("case", CASES)
def test_a_net_in_low_precision_stays_in_it(case):
    """Also where a rule draws its numbers, or its constants, in float64."""
    net = small_transformer(CASES[case], dtype=torch.bfloat16)
    tokens = net.tokenize(IDS)
    assert net.forward(tokens).dtype == torch.bfloat16
    assert net.forward(tokens, torch.Generator().manual_seed(0)).dtype == torch.bfloat16


def test_weights_of_another_net_are_refused():
    net = small_mlp("residual")
    fewer = {name: value for name, value in net.weights.items() if name != "1.mlp.in"}
    with pytest.raises(LabError, match=r"1\.mlp\.in has shape None, where this net has \(4, 4\)"):
        net.with_weights(fewer)
    with pytest.raises(LabError, match=r"2\.mlp\.more has shape \(1,\), where this net has None"):
        net.with_weights({**net.weights, "2.mlp.more": torch.zeros(1)})
    with pytest.raises(LabError, match=r"ends\.embed has shape \(6, 5\)"):
        net.with_weights({**net.weights, "ends.embed": torch.zeros(6, 5)})


def test_the_same_seed_gives_the_same_net_and_another_seed_another():
    first, again, other = (small_transformer("pre_ln", seed=seed).weights for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["1.attn.q"], other["1.attn.q"])
    state = torch.random.get_rng_state()
    small_mlp("fixup")
    assert torch.equal(torch.random.get_rng_state(), state)


def test_points_are_read_and_classes_are_said():
    points = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    net = lab.mlp("residual", depth=2, width=4, ends=lab.Points(points, classes=3))
    w = net.weights
    x = torch.tanh(points.double() @ w["ends.embed"])[:, None]
    trunk = net.trunk(net.tokenize(torch.tensor([[3], [4]])))
    assert (trunk.x0 - x).abs().max() < EXACT
    logits = net.readout(x)
    assert (logits[..., :3] - x @ w["ends.unembed"]).abs().max() < EXACT
    assert logits.softmax(-1)[..., 3:].max() == 0
    assert torch.equal(net.readout(x, [4, 1]), logits[..., [4, 1]])
    assert torch.equal(net.readout(x, [2, 0]), logits[..., [2, 0]])


def test_a_branch_of_another_width_is_projected_or_refused():
    wide = lab.Perceptron(hidden=5, out=7)
    with pytest.raises(LabError, match=r'"mlp" branches return 7 numbers, .* stream of 4; .* Switchable\(projection'):
        small_mlp("residual", branch=wide)
    net = worn(small_mlp(lab.Switchable("none", projection=True), branch=wide))
    assert net.weights["1.mlp.project"].shape == (7, 4)
    assert net.check.passed
    assert net.check_inside.passed
    assert "1.mlp.project" not in small_mlp(lab.Switchable(projection=True)).weights


@dataclass(frozen=True)
class Colliding(lab.Rule):
    """A rule that calls what it learns as the branch calls its matrix."""

    def start(self, place, rng):
        return {"out": torch.ones(1)}


def design(**changes):
    settings = {"rule": lab.Residual(), "branches": {"mlp": lab.Perceptron()}, "layers": 2, "width": 4}
    return lab.Design(**{**settings, "ends": lab.Words(5), **changes})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: lab.mlp("residul"), ["'residul'", "'residual'"]),
        (lambda: lab.mlp(depth=0), ["depth=0", "from 1 on"]),
        (lambda: lab.mlp(depth=-3), ["depth=-3"]),
        (lambda: lab.mlp(depth=2.0), ["depth=2.0"]),
        (lambda: lab.mlp(depth=True), ["depth=True"]),
        (lambda: lab.mlp(width=0), ["width=0"]),
        (lambda: lab.mlp(width="8"), ["width='8'"]),
        (lambda: lab.mlp(dtype=torch.int64), ["torch.int64", "torch.float32"]),
        (lambda: lab.transformer(width=10), ["10 numbers", "4 heads", "width such as 8"]),
        (lambda: lab.transformer(width=2), ["2 numbers", "width such as 4"]),
        (lambda: lab.Attention(heads=0), ["heads=0"]),
        (lambda: lab.Attention(heads=2.5), ["heads=2.5"]),
        (lambda: lab.Attention(sharpness=float("nan")), ["sharpness=nan"]),
        (lambda: lab.Perceptron(hidden=0), ["hidden=0"]),
        (lambda: lab.Perceptron(out=False), ["out=False"]),
        (lambda: lab.Perceptron(activation="swish"), ["activation='swish'", "'gelu'"]),
        (lambda: lab.Perceptron(std=(1.0, float("inf"))), ["std=inf"]),
        (lambda: lab.Layer("softsign"), ["activation='softsign'"]),
        (lambda: lab.Words(1), ["vocab=1", "from 2 on"]),
        (lambda: lab.Words(positions=0), ["positions=0"]),
        (lambda: lab.Points(torch.zeros(3, 2), classes=1), ["classes=1", "2 or more"]),
        (lambda: lab.Points(torch.zeros(3, 2), classes=2.0), ["classes=2.0"]),
        (lambda: lab.Points(torch.zeros(3, 3), classes=2), ["(3, 3)", "two numbers"]),
        (lambda: lab.Points(torch.zeros(0, 2), classes=2), ["(0, 2)"]),
        (lambda: lab.mlp(branch=lab.Attention()), ["lab.transformer", "attention="]),
        (lambda: design(branches={"ffn": lab.Perceptron()}), ["'ffn'", "'mlp'"]),
        (lambda: design(rule=Colliding()).start(0, torch.float64), ["Colliding", "'out'", "another name"]),
    ],
)
def test_sizes_that_make_no_net_are_refused(make, words):
    with unchecked(), pytest.raises(LabError) as caught:
        make()
    assert all(word in str(caught.value) for word in words), caught.value
