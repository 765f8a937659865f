"""Variance, gradient and first update of untrained stacks against plain loops, and the experiments about them."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from resstream import lab
from resstream.errors import LabError
from resstream.lab import experiments
from resstream.lab.experiments.parts import trained_norms
from resstream.lab.experiments.parts.at_start import at_start, mean_loss, one_direction, random_words
from resstream.lab.experiments.parts.first_update import first_update, matrices_of, within_branches
from resstream.lab.experiments.parts.passages import passages

# The modules, whose functions have their names.
deepnorm_depth, norm_placement, variance_growth = (
    import_module(f"resstream.lab.experiments.{name}")
    for name in ("deepnorm_depth", "norm_placement", "variance_growth")
)


def verdicts(result):
    return [claim["verdict"] for claim in result.settings["claims"]]


def norm(x):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()


def states_by_hand(net, ids, *, pre, slip=1.0):
    """The stream of a Transformer after each layer, head by head and query by query; `slip` plants an error."""
    w = net.weights
    x = w["ends.embed"][ids]
    states = [x.requires_grad_()]
    for layer in range(net.n_layers):
        for kind in ("attn", "mlp"):
            own = {name.split(".", 2)[2]: value for name, value in w.items() if name.startswith(f"{layer}.{kind}.")}
            h = norm(x) if pre else x
            y = attention_by_hand(h, own, net.n_heads) if kind == "attn" else torch.relu(h @ own["in"]) @ own["out"]
            x = x + slip * y if pre else norm(x + slip * y)
        states.append(x)
    final = norm(x) if pre else x
    return states, final @ w["ends.unembed"]


def attention_by_hand(h, own, heads):
    parts = []
    for q, k, v in zip(*((h @ own[name]).chunk(heads, -1) for name in "qkv"), strict=True):
        rows = []
        for query in range(h.shape[1]):
            scores = (q[:, query, None] * k).sum(-1) / q.shape[-1] ** 0.5
            weights = scores.exp() / scores.exp().sum(1, keepdim=True)
            rows.append((weights[..., None] * v).sum(1))
        parts.append(torch.stack(rows, 1))
    return torch.cat(parts, -1) @ own["o"]


@pytest.mark.parametrize("rule", norm_placement.RULES)
def test_the_start_of_a_transformer_is_that_of_plain_loops(rule):
    net, sample = norm_placement._net(rule, 3, 0), random_words(2, 5)
    found = at_start(net, sample, ["2.mlp.out"])

    def hand(slip):
        last = net.weights["2.mlp.out"].clone().requires_grad_()
        own = net.with_weights({**net.weights, "2.mlp.out": last})
        states, logits = states_by_hand(own, sample.ids, pre=rule == "pre_ln", slip=slip)
        slopes = torch.autograd.grad(cross_entropy(logits.flatten(0, 1), sample.labels.flatten()), [*states, last])
        return [float(state.detach().var(unbiased=False)) for state in states], [float(each.norm()) for each in slopes]

    assert found.variance == pytest.approx(hand(1.0)[0], rel=1e-9)
    assert [*found.gradient, found.weights["2.mlp.out"]] == pytest.approx(hand(1.0)[1], rel=1e-9)
    assert found.in_over_out == pytest.approx(hand(1.0)[1][0] / hand(1.0)[1][-2], rel=1e-9)
    assert [*found.gradient, found.weights["2.mlp.out"]] != pytest.approx(hand(1.001)[1], rel=1e-5)


def test_the_place_of_the_norm_sets_the_gradient(monkeypatch):
    # Five seeds: the last layer's gradient scatters by a sixth with Pre-LN; with Post-LN in / out is 0.16 to 1.03, and
    # last / first 1.0 to 6.8 (95%), far from what Pre-LN gives: 5.4 and 0.3.
    found = experiments.norm_placement(depths=(6, 24), seeds=5)
    means = np.exp(np.log(found.data.last_scaled.sel(rule="pre_ln").values).mean(-1))
    assert means.max() / means.min() < 1.15
    assert float(found.data.in_out_mean.sel(rule="post_ln", depth=24)) < 0.5
    post = found.data.sel(rule="post_ln", depth=24)
    assert np.exp(np.log(post["last"] / post["first"]).mean()) > 2
    assert verdicts(found) == ["holds", "holds", "does not hold"]
    assert found.check.passed
    honest = norm_placement._net
    other = {"pre_ln": "post_ln", "post_ln": "pre_ln"}
    monkeypatch.setattr(norm_placement, "_net", lambda rule, *args: honest(other[rule], *args))
    assert verdicts(experiments.norm_placement(depths=(6, 24), seeds=2)) == ["does not hold"] * 3


def test_variance_grows_by_the_law_of_each_rule(smollm2):
    # Five seeds, 200 steps: Pre-LN 180 to 234 of 201, all others within a tenth of the law (95%).
    found = experiments.variance_growth(steps=60, seeds=1, texts=1, model=smollm2)
    told = found.data.variance[:, 0].to_series()
    assert told.drop("no norm").values == pytest.approx(found.data.variance_reference.values[1:], rel=0.2)
    assert told["no norm"] ** (1 / 60) == pytest.approx(2, rel=0.02)
    gradient = found.data.gradient[:, 0].to_series().drop(["no norm", "Post-LN"])
    reference = found.data.gradient_reference.to_series().drop(["no norm", "Post-LN"])
    assert gradient.values == pytest.approx(reference.values, rel=0.15)
    assert [gradient[name] for name in ("ReZero", "SkipInit", "Fixup", "AdaLN")] == [1.0] * 4
    *rules, amplitude, factor = verdicts(found)
    assert rules == ["holds"] * len(variance_growth.STACKS)
    assert (amplitude, factor) == ("holds at initialisation only", "holds")
    assert found.check.passed
    net = variance_growth._net("Pre-LN, 1/sqrt(2N)", 60, 0)
    x = x0 = net.weights["ends.embed"][random_words(64, 1).ids[:, 0]]
    for step in range(60):
        x = x + torch.relu(norm(x) @ net.weights[f"{step}.mlp.in"]) @ net.weights[f"{step}.mlp.out"]
    assert told["Pre-LN, 1/sqrt(2N)"] == pytest.approx(float(x.var() / x0.var()), rel=1e-9)


def test_a_rule_that_does_not_do_what_it_should_is_noticed(smollm2, monkeypatch):
    name = "Pre-LN, 1/sqrt(2N)"
    wrong = replace(variance_growth.STACKS[name], rule="pre_ln")
    monkeypatch.setattr(variance_growth, "STACKS", {**variance_growth.STACKS, name: wrong})
    found = experiments.variance_growth(stacks=[name], steps=60, seeds=1, texts=1, model=smollm2)
    assert verdicts(found)[0] == "does not hold"


def test_trained_norms_are_those_of_plain_hooks(smollm2):
    texts, seen = passages(1), []
    handles = [
        layer.register_forward_hook(lambda _, __, output: seen.append(output))
        for layer in smollm2.hf_model.model.layers
    ]
    with torch.no_grad():
        smollm2.hf_model(**smollm2.tokenizer(texts, return_tensors="pt"))
    for handle in handles:
        handle.remove()
    found = trained_norms.norms_by_layer(smollm2, texts)
    plain = [each[0] if isinstance(each, tuple) else each for each in seen]
    sizes = np.array([each[0].norm(dim=-1).numpy() for each in plain])
    assert found.shape == (1, 30)
    assert found[0] == pytest.approx(np.median(sizes[:, 1:-1], axis=1), rel=1e-4)
    assert found[0] != pytest.approx(np.median(sizes[:, 1:], axis=1), rel=1e-4)


def test_the_two_laws_are_told_apart():
    layers = np.arange(1.0, 31)
    power, factor = trained_norms.growth_of(2 * layers**0.5), trained_norms.growth_of(5 * 1.045**layers)
    assert power.power == pytest.approx(0.5)
    assert power.power_fits == pytest.approx(1)
    assert power.factor_fits < 0.95
    assert factor.factor == pytest.approx(1.045)
    assert factor.factor_fits == pytest.approx(1)
    assert factor.power_fits < 0.9
    assert factor.fitted == pytest.approx(5 * 1.045**layers)


OPTIMISERS = {"SGD": lambda weights, rate: torch.optim.SGD(weights, lr=rate), "Adam": torch.optim.Adam}


@pytest.mark.parametrize("method", OPTIMISERS)
def test_the_first_update_is_that_of_the_optimiser(method):
    net, sample, rate = deepnorm_depth._net("deep_norm", 2, 0), random_words(2, 4), 1e-3
    names = matrices_of(net)
    assert {name.rpartition(".")[2] for name in names} == {"q", "k", "v", "o", "in", "out"}
    assert set(within_branches(net)) - set(names) == {name for name in net.weights if "bias" in name or "norm" in name}
    moved = {name: net.weights[name].clone().requires_grad_() for name in names}
    own = net.with_weights({**net.weights, **moved})
    before = own.own_logits(own.tokenize(sample.ids))
    cross_entropy(before.flatten(0, 1), sample.labels.flatten()).backward()
    OPTIMISERS[method](list(moved.values()), rate).step()
    change = (own.own_logits(own.tokenize(sample.ids)) - before).detach().numpy()
    expected = np.sqrt((change**2).mean())
    assert first_update(net, sample, names, method, rate) == pytest.approx(expected, rel=1e-6)
    assert first_update(net, sample, names, method, 1.001 * rate) != pytest.approx(expected, rel=1e-5)


def test_deep_norm_bounds_the_update_of_its_matrices_and_of_nothing_else(monkeypatch):
    # Three seeds: the power of the depth scatters by 0.02 for SGD on matrices.
    found = experiments.deepnorm_depth(depths=(10, 30, 100), seeds=1)
    constants, encoder, *_ = found.settings["claims"]
    assert constants["found"] == "3.7606, 0.1880"
    assert encoder["found"] == "1.6862, 0.4179, 2.0598, 0.3433"
    assert verdicts(found) == ["holds"] * 4 + ["does not hold"] * 2
    assert found.data.in_out.sel(rule="deep_norm").values == pytest.approx(1, rel=0.15)
    assert found.data.in_out.sel(rule="post_ln", depth=100).item() < 0.3
    sgd = found.data.moved.sel(depth=100, seed=0)
    assert sgd.sel(first_step="Post-LN, SGD on matrices") > 10 * sgd.sel(first_step="DeepNorm, SGD on matrices")
    assert found.check.passed
    honest = deepnorm_depth._net
    monkeypatch.setattr(deepnorm_depth, "_net", lambda rule, *args: honest("pre_ln", *args))
    assert verdicts(experiments.deepnorm_depth(depths=(5, 50), seeds=1))[2:4] == ["does not hold"] * 2


def test_beta_scales_perceptrons_values_and_outputs_and_not_queries_and_keys():
    deep, plain = (deepnorm_depth._net(rule, 100, 0).weights for rule in ("deep_norm", "post_ln"))
    for name in ("q", "k"):
        assert torch.equal(deep[f"50.attn.{name}"], plain[f"50.attn.{name}"])
    for name in ("attn.v", "attn.o", "mlp.in", "mlp.out"):
        assert (deep[f"50.{name}"] / plain[f"50.{name}"]).numpy() == pytest.approx(0.1880, abs=5e-5)


def test_a_random_direction_has_a_gradient_where_the_readout_is_zero():
    net, sample = lab.mlp("fixup", depth=3), random_words(4, 1)
    assert at_start(net, sample, score=mean_loss).gradient.tolist() == [0.0] * 4
    assert at_start(net, sample, score=one_direction).in_over_out == 1.0


def test_what_cannot_be_built_is_refused(smollm2):
    with pytest.raises(LabError, match="seeds=0"):
        experiments.norm_placement(seeds=0)
    with pytest.raises(LabError, match="depth=-3"):
        experiments.norm_placement(depths=(-3,), seeds=1)
    with pytest.raises(LabError, match="'Pre-LN'"):
        experiments.variance_growth(stacks=["BatchNorm"])
    with pytest.raises(LabError, match="texts=7"):
        experiments.variance_growth(texts=7)
    with pytest.raises(LabError, match="seeds="):
        experiments.deepnorm_depth(seeds=-1)
