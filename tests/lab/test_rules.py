"""Residual rules: one step against its formula, gradients against finite differences, and what is drawn in training."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass

import pytest
import torch
from lab.small_nets import CASES, small_mlp, small_transformer, worn
from stream.test_read import unchecked

from resstream import lab
from resstream.errors import LabError
from resstream.lab.opened import NetTrunk

EXACT = 1e-12
IDS = torch.tensor([[1, 2, 5], [4, 0, 3]])


def norm(x, weight=1.0, shift=0.0):
    """LayerNorm, written out."""
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    return weight * centred / ((centred**2).sum(-1, keepdim=True) / x.shape[-1] + 1e-5).sqrt() + shift


def own(x, w, name="norm"):
    return norm(x, w[f"{name}.weight"], w[f"{name}.bias"])


def gate(x, w):
    return 1 / (1 + torch.exp(-(x @ w["gate"] + w["gate.bias"])))


def led(x, f, w):
    """adaLN-Zero for prompts whose condition is c."""
    c = w["c"][:, None]
    shift, scale, size = ((c / (1 + torch.exp(-c))) @ w["condition"] + w["condition.bias"]).split(x.shape[-1], -1)
    return x + size * f((1 + scale) * norm(x) + shift)


# The second of three steps, x, by the branch f and the step's weights w.
FORMULAS = {
    "plain": lambda x, f, w: f(x),
    "residual": lambda x, f, w: x + f(x),
    "scaled_skip": lambda x, f, w: 0.9 * x + f(x),
    "trunk_activation": lambda x, f, w: torch.tanh(x + f(x)),
    "trunk_activation, relu": lambda x, f, w: (x + f(x)).clamp_min(0),
    "gated_skip": lambda x, f, w: (1 - gate(x, w)) * x + gate(x, w) * f(x),
    "projected_skip": lambda x, f, w: x @ w["skip"] + f(x),
    "dropout_skip": lambda x, f, w: 0.5 * x + f(x),
    "stochastic_depth": lambda x, f, w: x + (1 - 2 / 3 * 0.5) * f(x),
    "pre_ln": lambda x, f, w: x + f(own(x, w)),
    "post_ln": lambda x, f, w: own(x + f(x), w),
    "sandwich_ln": lambda x, f, w: x + own(f(own(x, w)), w, "second"),
    "ada_ln": led,
    "deep_norm": lambda x, f, w: own(3**0.25 * x + f(x), w),
    "gpt2_scaling": lambda x, f, w: x + f(own(x, w)),
    "ln_scaling": lambda x, f, w: x + f(own(x, w) / math.sqrt(2)),
    "re_zero": lambda x, f, w: x + w["factor"] * f(x),
    "skip_init": lambda x, f, w: x + w["factor"] * f(x),
    "skip_init, by depth": lambda x, f, w: x + w["factor"] * f(x),
    "layer_scale": lambda x, f, w: x + w["scale"] * f(own(x, w)),
    "fixup": lambda x, f, w: x + w["factor"] * f(x + w["before"]) + w["after"],
    "t_fixup": lambda x, f, w: x + f(x),
    "switchable": lambda x, f, w: x + f(own(x, w)),
    "switchable, all": lambda x, f, w: own(x @ w["skip"] + w["factor"] * f(x) @ w["project"], w),
    "switchable, none": lambda x, f, w: x + f(x),
}


def a_step(case, off=0.0):
    """A step of a worn net, and the same by its formula, whose branch may be off in its first number."""
    out = 6 if case == "switchable, all" else None
    net = worn(small_mlp(CASES[case], branch=lab.Perceptron(hidden=5, out=out)))
    tokens, w = net.tokenize(IDS), dict(net.of("1.mlp"))
    if case == "ada_ln":
        w["c"] = net.weights["ends.condition"][IDS[:, 0]]
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)

    def branch(z):
        y = torch.tanh(z @ w["in"] + w["in.bias"]) @ w["out"] + w["out.bias"]
        return y + off * torch.eye(y.shape[-1], dtype=y.dtype)[0]

    return net.trunk(tokens).layer(1, x), FORMULAS[case](x, branch, w)


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_its_formula(case):
    found, expected = a_step(case)
    assert (found - expected).abs().max() < EXACT


@pytest.mark.parametrize("case", CASES)
def test_a_branch_that_is_off_by_a_thousandth_is_noticed(case):
    found, expected = a_step(case, off=1e-3)
    assert (found - expected).abs().max() > 1e-5


@dataclass(frozen=True)
class OffByAThousandth(lab.Branch):
    """A perceptron with the right values and gradients that are 0.1 % too large."""

    inner: lab.Perceptron
    matrices: int = 2

    def start(self, width, rng, gain):
        return self.inner.start(width, rng, gain)

    def apply(self, x, weights, mask, inside):
        y = self.inner.apply(x, weights, mask, inside)
        return y + 0.001 * (y - y.detach())


def gradient_error(net, noise_seed=None):
    """The worst directional derivative, over the stream at its start and every weight, against central differences."""
    rng = torch.Generator().manual_seed(3)
    leaves = {name: value.clone().requires_grad_() for name, value in net.weights.items()}
    shift = torch.zeros(*IDS.shape, net.d_model, dtype=torch.float64, requires_grad=True)
    target = torch.randn(*IDS.shape, net.vocab_size, generator=rng, dtype=torch.float64)

    def loss(weights, shift):
        noise = None if noise_seed is None else torch.Generator().manual_seed(noise_seed)
        one = net.with_weights(weights)
        trunk = NetTrunk.of(one, one.tokenize(IDS), noise)
        x = trunk.x0 + shift
        for layer in trunk.order:
            x = trunk.layer(layer, x)
        return (one.readout(x) * target).sum() / IDS.numel()

    names = list(leaves)
    gradients = torch.autograd.grad(
        loss(leaves, shift), [*leaves.values(), shift], allow_unused=True, materialize_grads=True
    )
    worst = 0.0
    for number, gradient in enumerate(gradients):
        direction = torch.randn(gradient.shape, generator=rng, dtype=torch.float64)
        direction = direction / direction.norm()
        values = []
        with torch.no_grad():
            for sign in (1, -1):
                step = sign * 1e-5 * direction
                if number < len(names):
                    name = names[number]
                    values.append(loss({**leaves, name: leaves[name] + step}, shift))
                else:
                    values.append(loss(leaves, shift + step))
        slope = float((gradient * direction).sum())
        worst = max(worst, abs(float(values[0] - values[1]) / 2e-5 - slope) / max(1e-2, abs(slope)))
    return worst


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_central_differences(case):
    assert gradient_error(worn(small_mlp(CASES[case], depth=2))) < 1e-6
    assert gradient_error(worn(small_transformer(CASES[case], layers=1))) < 1e-6


@pytest.mark.parametrize("case", CASES)
def test_a_gradient_that_is_off_by_a_thousandth_is_noticed(case):
    net = worn(small_mlp(CASES[case], depth=2, branch=OffByAThousandth(lab.Perceptron(5))))
    assert gradient_error(net) > 1e-4


@pytest.mark.parametrize("case", ["dropout_skip", "stochastic_depth"])
def test_gradients_in_training_are_central_differences(case):
    assert gradient_error(worn(small_transformer(CASES[case])), noise_seed=5) < 1e-6


def a_mean_in_training(rule, draws=4000):
    """Mean over draws of what one step makes of the stream in training, one draw for each prompt, and that outside."""
    net = worn(small_mlp(rule, depth=1))
    tokens = net.tokenize(torch.tensor([[2, 5]]).expand(draws, -1))
    found = net.forward(tokens, torch.Generator().manual_seed(0))
    return found, net.forward(tokens)[0]


@pytest.mark.parametrize("rule", [lab.DropoutSkip(0.3), lab.StochasticDepth(0.4)], ids=str)
def test_a_step_outside_of_training_is_the_expectation_in_training(rule):
    found, outside = a_mean_in_training(rule)
    spread = found.std(0) / math.sqrt(len(found))
    assert (found.std(0) > 1e-3).all()
    assert ((found.mean(0) - outside).abs() < 5 * spread).all()


def test_an_expectation_that_is_off_is_noticed():
    found, _ = a_mean_in_training(lab.StochasticDepth(0.4))
    _, outside = a_mean_in_training(lab.StochasticDepth(0.5))
    spread = found.std(0) / math.sqrt(len(found))
    assert ((found.mean(0) - outside).abs() > 5 * spread).any()


def test_stochastic_depth_drops_whole_prompts_at_a_rate_that_rises_with_depth():
    net = worn(small_mlp(lab.StochasticDepth(0.4), depth=4))
    tokens = net.tokenize(torch.tensor([[2, 5]]).expand(3000, -1))
    trunk = NetTrunk.of(net, tokens, torch.Generator().manual_seed(1))
    x = trunk.x0
    for layer, kept in enumerate((0.85, 0.7, 0.55, 0.4)):
        written = trunk.write(net.design.sites[layer], x)
        whole = net.trunk(tokens).write(net.design.sites[layer], x)[:1] / kept
        dropped, left = (written == 0).flatten(1).all(1), (written - whole).abs().flatten(1).amax(1) < EXACT
        assert (dropped ^ left).all()
        assert abs(float(left.double().mean()) - kept) < 0.05


def test_dropout_on_the_skip_drops_numbers_of_the_stream_one_by_one():
    net = worn(small_mlp(lab.DropoutSkip(0.25), depth=1))
    tokens = net.tokenize(torch.tensor([[2, 5]]).expand(2000, -1))
    trunk = NetTrunk.of(net, tokens, torch.Generator().manual_seed(1))
    passed = trunk.layer(0, trunk.x0) - trunk.write(net.design.sites[0], trunk.x0)
    kept = (passed - trunk.x0).abs() < EXACT
    assert (kept | (passed.abs() < EXACT)).all()
    assert abs(float(kept.double().mean()) - 0.75) < 0.02


@pytest.mark.parametrize("name", lab.RULES)
def test_a_rule_says_its_equation_and_its_source(name):
    kind = lab.RULES[name]
    text = inspect.getdoc(kind)
    assert "<-" in text.splitlines()[0]
    assert "Source:" in text
    assert kind.__final__
    assert lab.rule_of(name) == kind() == lab.rule_of(kind())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: lab.rule_of("pre-ln"), ["'pre-ln'", "'pre_ln'", "PreLN()"]),
        (lambda: lab.rule_of(lab.PreLN), ["PreLN"]),
        (lambda: lab.DropoutSkip(-0.1), ["rate=-0.1", "0 to 1"]),
        (lambda: lab.DropoutSkip(True), ["rate=True"]),
        (lambda: lab.DropoutSkip(float("nan")), ["rate=nan"]),
        (lambda: lab.StochasticDepth(0), ["survival=0", "above 0"]),
        (lambda: lab.StochasticDepth(1.5), ["survival=1.5"]),
        (lambda: lab.TrunkActivation("gelu"), ["activation='gelu'", "'tanh', 'relu'"]),
        (lambda: lab.SkipInit("one"), ["start_at='one'", "'zero', 'depth'"]),
        (lambda: lab.LayerScale("small"), ["start_at='small'", "finite"]),
        (lambda: lab.ScaledSkip(float("inf")), ["scale=inf", "finite"]),
        (lambda: lab.GatedSkip("open"), ["bias='open'"]),
        (lambda: lab.Switchable("middle"), ["norm='middle'", "'pre', 'post', 'none'"]),
        (lambda: lab.DeepNormScales.single(0), ["layers=0"]),
        (lambda: lab.DeepNormScales.single(True), ["layers=True"]),
        (lambda: lab.DeepNormScales.encoder(12, -1), ["decoder_layers=-1"]),
    ],
    ids=lambda value: "" if callable(value) else value[0],
)
def test_a_rule_that_makes_no_sense_is_refused(make, words):
    with unchecked(), pytest.raises(LabError) as caught:
        make()
    assert all(word in str(caught.value) for word in words)


def test_a_condition_that_is_missing_is_said():
    net = small_mlp("ada_ln")
    place = net.design.place(net.design.sites[0])
    with pytest.raises(LabError, match="condition"):
        net.design.rule.prepare(net.of("0.mlp"), place, lab.Batch(torch.Size((1, 2, 4))))
