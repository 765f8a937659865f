"""Every measure on toy nets of every rule: it runs, its identity holds, and inside branches it is a plain loop."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from lab.small_nets import CASES, small_mlp, small_transformer, worn

import resstream as rs
from resstream import lab
from resstream.errors import UnsupportedModelError

EXACT = 1e-10
CLEAN, CORRUPTED = torch.tensor([[1, 2, 5]]), torch.tensor([[1, 3, 4]])
METRIC = rs.logit_diff(0, 4)
BUILDS = {"mlp": small_mlp, "transformer": partial(small_transformer, layers=2)}
NETS = [(build, case) for build in BUILDS for case in (*lab.RULES, "switchable, all")]

# One call of each measure that needs no heads.
MEASURES = {
    "logit_lens": lambda net: rs.logit_lens(net, CLEAN),
    "patch_activations": lambda net: rs.patch_activations(net, CLEAN, CORRUPTED, METRIC),
    "patch_activations, neurons": lambda net: rs.patch_activations(net, CLEAN, CORRUPTED, METRIC, sites="neuron"),
    "attribution_patching": lambda net: rs.attribution_patching(net, CLEAN, CORRUPTED, METRIC),
    "ablate_layers": lambda net: rs.ablate_layers(net, CLEAN, metric=METRIC),
    "ablate_layers, mlp": lambda net: rs.ablate_layers(net, CLEAN, metric=METRIC, unit="mlp", how="zero"),
    "path_lengths": lambda net: rs.path_lengths(net, CLEAN, METRIC),
    "path_lengths, layers": lambda net: rs.path_lengths(net, CLEAN, METRIC, unit="layer"),
    "logit_by_path_length, frozen": lambda net: rs.logit_by_path_length(net, CLEAN, 0, 4),
    "logit_by_path_length, jacobian": lambda net: rs.logit_by_path_length(net, CLEAN, 0, 4, gauge="jacobian"),
    "logit_by_path_length, direct": lambda net: rs.logit_by_path_length(net, CLEAN, 0, 4, gauge="direct"),
    "lesion_curve": lambda net: rs.lesion_curve(net, CLEAN, samples=2),
    "layer_ensemble": lambda net: rs.layer_ensemble(net, CLEAN, METRIC),
    "direct_effects": lambda net: rs.direct_effects(net, CLEAN, CORRUPTED, METRIC),
    "path_patching": lambda net: rs.path_patching(
        net, CLEAN, CORRUPTED, METRIC, senders=["0.mlp"], receivers=["1.mlp"]
    ),
}


@pytest.fixture(scope="module", params=NETS, ids=" ".join)
def net(request):
    """A worn net of each rule."""
    build, case = request.param
    return worn(BUILDS[build](CASES[case]))


@pytest.mark.parametrize("measure", MEASURES)
def test_a_measure_runs_and_its_identity_holds(net, measure):
    result = MEASURES[measure](net)
    assert result.check.passed, result.check
    assert not any(np.isinf(value).any() for value in result.data.values() if value.dtype.kind == "f")


def test_a_reading_and_an_edit_of_nothing(net):
    stream = rs.read(net, CLEAN, sites=["resid_pre", "attn", "mlp", "resid_post"])
    assert stream.check.passed
    with rs.edited(net, rs.Scale("1.mlp", 1.0), rs.Add("1.resid_post", 0 * net.weights["ends.embed"][0])) as same:
        assert (same.logits(CLEAN) - stream.logits).abs().max() < EXACT


def test_heads_are_patched_where_they_can_be_told_apart(net):
    if net.n_heads and net.design.rule != lab.GatedSkip():
        result = rs.patch_activations(net, CLEAN, CORRUPTED, METRIC, sites="head")
        assert result.check.passed
        assert result.data.sizes["head"] == 2
    else:
        with pytest.raises(UnsupportedModelError, match='"head"'):
            rs.read(net, CLEAN, sites="head")


def without_constants(net):
    """The net without biases and shifts, so that with scales and gates held fixed all of it is linear."""
    return net.with_weights(
        {
            name: 0 * value if name.endswith(".bias") or name.split(".")[-1] in ("before", "after") else value
            for name, value in net.weights.items()
        }
    )


def test_without_biases_every_path_of_the_frozen_gauge_begins_at_the_embedding(net):
    net = without_constants(net)
    data = rs.logit_by_path_length(net, CLEAN, 0, 4).data
    # The shift that a condition brings is a constant of the branch like any bias.
    begun = abs(data.term_from.sel(source=[source for source in data.source.values if source != "embed"])).max()
    if net.design.rule == lab.AdaLN():
        assert begun > 1e-3
    else:
        assert begun < 1e-9 * max(1.0, float(abs(data.term).max()))
        assert abs(data.constant).max() < 1e-9


def test_biases_begin_elsewhere_and_so_does_a_gate_that_is_not_held_fixed(monkeypatch):
    net = worn(small_transformer("gated_skip"))
    for case in (net, without_constants(net)):
        data = rs.logit_by_path_length(case, CLEAN, 0, 4).data
        assert bool(abs(data.term_from.sel(source="1.mlp")).max() > 1e-3) == (case is net)
    monkeypatch.setattr("resstream.lab.rules.skips._gate", lambda x, w: torch.sigmoid(x @ w["gate"] + w["gate.bias"]))
    data = rs.logit_by_path_length(without_constants(net), CLEAN, 0, 4).data
    assert abs(data.term_from.sel(source="1.mlp")).max() > 1e-3


def logits_with(net, tokens, layer, kind, value):
    """The difference of logits of a run, by a plain loop, in which a value inside a branch is another."""
    trunk = net.trunk(net.tokenize(tokens))
    x = trunk.x0
    for number in trunk.order:
        x = trunk.layer(number, x, {kind: lambda own: value(own)} if number == layer else None)
    logits = net.readout(x)[0, -1]
    return logits[0] - logits[4]


PARTS = {"z": 2, "q": 2, "k": 2, "v": 2, "pattern": 1, "neuron": 2}


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("case", ["residual", "deep_norm", "sandwich_ln", "gated_skip", "ada_ln"])
def test_patches_and_their_estimates_inside_branches_are_plain_loops(case, kind):
    """The clean value of one part at one position, put into the corrupted run; and its first order by autograd."""
    net = worn(small_transformer(CASES[case]))
    choice = {"neurons": "each"} if kind == "neuron" else {}
    found, guess = (
        measure(net, CLEAN, CORRUPTED, METRIC, sites=kind, layers=[1], positions=["last"], **choice)
        for measure in (rs.patch_activations, rs.attribution_patching)
    )
    seen = {name: rs.read(net, ids, sites=kind)[f"1.{kind}"] for name, ids in (("clean", CLEAN), ("bad", CORRUPTED))}
    base = logits_with(net, CORRUPTED, 1, kind, lambda own: own)
    for part in range(2):

        def patch(own, share=1.0, part=part):
            place = (slice(None), part, -1) if kind == "pattern" else (slice(None), -1, part)
            put = own.clone()
            put[place] = own[place] + share * (seen["clean"][place] - seen["bad"][place])
            return put

        expected = logits_with(net, CORRUPTED, 1, kind, patch)
        share = torch.zeros((), dtype=torch.float64, requires_grad=True)
        moved = logits_with(net, CORRUPTED, 1, kind, lambda own, share=share, patch=patch: patch(own, share))
        (slope,) = torch.autograd.grad(moved, share)
        axis = "neuron" if kind == "neuron" else "head"
        cell = {axis: part, "layer": 1}
        off = logits_with(net, CORRUPTED, 1, kind, lambda own, patch=patch: patch(own, 0.999))
        assert abs(float(found.data.metric.sel(cell).squeeze()) - float(expected)) < EXACT < abs(expected - off)
        assert abs(float(guess.data.metric.sel(cell).squeeze()) - float(base + slope)) < EXACT
