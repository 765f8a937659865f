"""Initialisations of residual rules: each has, before training, the property that it exists for."""

from __future__ import annotations

import math

import pytest
import torch
from lab.small_nets import small_mlp, small_transformer, worn

from resstream import lab

STEPS, WIDTH, HIDDEN, PROMPTS = 200, 128, 256, 64
HE = math.sqrt(2)  # what keeps the variance of ReLU branches, in units of 1 / sqrt(neurons)


def geometric(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def along_the_stack(rule, seeds=1, out_std=HE):
    """Variance at the end of 200 steps W2 relu(W1 h), and a gradient's norm at the input over that at the end."""
    variances, gradients = [], []
    for seed in range(seeds):
        branch = lab.Perceptron(HIDDEN, "relu", (1.0, out_std))
        net = lab.mlp(rule, depth=STEPS, width=WIDTH, branch=branch, ends=lab.Words(PROMPTS), seed=seed)
        trunk = net.trunk(net.tokenize(torch.arange(PROMPTS)[:, None]))
        start = trunk.x0.detach().requires_grad_()
        x = start
        for layer in trunk.order:
            x = trunk.layer(layer, x)
        # Of a seed that no embedding has: along the stream itself, a norm lets no gradient pass.
        top = torch.randn(x.shape, generator=torch.Generator().manual_seed(1000 + seed), dtype=torch.float64)
        (bottom,) = torch.autograd.grad(x, start, top)
        variances.append(float(x.detach().var()))
        gradients.append(float(bottom.norm() / top.norm()))
    return geometric(variances), geometric(gradients)


def is_near(found, expected):
    """Variance within 20 %, gradient within 15 %."""
    return abs(found[0] / expected[0] - 1) < 0.2 and abs(found[1] / expected[1] - 1) < 0.15


# In closed form, for independent branches: each norm makes a branch add 1 to the variance; without one it doubles it.
FIGURES = {
    "pre_ln": (lab.PreLN(), 1 + STEPS, 15.1, 3),
    "sandwich_ln": (lab.SandwichLN(), 1 + STEPS, 15.9, 3),
    "gpt2_scaling": (lab.GPT2Scaling(), 2.0, 1.42, 1),
    "ln_scaling": (lab.LNScaling(), 1 + sum(1 / layer for layer in range(1, STEPS + 1)), 2.65, 1),
    "layer_scale": (lab.LayerScale(0.1), 1 + STEPS * 0.1**2, 1.75, 1),
    "layer_scale, by depth": (lab.LayerScale(), 1.0, 1.0, 1),
    "deep_norm": (lab.DeepNorm(), 1.0, 1.007, 1),
    "skip_init, by depth": (lab.SkipInit("depth"), (1 + 1 / STEPS) ** STEPS, 1.65, 1),
}


@pytest.mark.parametrize("case", FIGURES)
def test_variance_and_gradient_along_200_steps(case):
    rule, variance, gradient, seeds = FIGURES[case]
    assert is_near(along_the_stack(rule, seeds), (variance, gradient))


def test_without_a_norm_variance_doubles_with_each_step_unless_branches_start_smaller():
    variance, gradient = along_the_stack("residual")
    assert abs(math.log2(variance) - STEPS) < 4
    assert abs(math.log2(gradient) - STEPS / 2) < 2
    scaled = along_the_stack("residual", out_std=math.sqrt(2 / STEPS))
    assert is_near(scaled, (math.e, math.sqrt(math.e)))


def test_a_start_that_lacks_its_factor_is_noticed():
    assert not is_near(along_the_stack("pre_ln"), FIGURES["gpt2_scaling"][1:3])
    assert not is_near(along_the_stack("post_ln"), FIGURES["deep_norm"][1:3])


IDENTITIES = [
    lab.ReZero(),
    lab.SkipInit(),
    lab.AdaLN(),
    lab.Fixup(),
    lab.Switchable("none", rezero=True),
    lab.Switchable("pre", rezero=True, projection=True),
]


@pytest.mark.parametrize("rule", IDENTITIES, ids=str)
def test_the_stack_is_the_identity_at_its_start(rule):
    for net in (small_mlp(rule, depth=30), small_transformer(rule, layers=15)):
        tokens = net.tokenize(torch.tensor([[1, 2, 5], [4, 0, 3]]))
        assert torch.equal(net.forward(tokens), net.trunk(tokens).x0)
        after = worn(net, by=1e-3)
        assert not torch.equal(after.forward(tokens), after.trunk(tokens).x0)


def test_a_layer_scale_starts_close_to_the_identity_and_not_at_it():
    for depth, size in ((18, 0.1), (24, 1e-5), (30, 1e-6)):
        net = small_mlp("layer_scale", depth=depth)
        tokens = net.tokenize(torch.tensor([[1, 2, 5]]))
        moved = float((net.forward(tokens) - net.trunk(tokens).x0).abs().max())
        assert 0 < moved < 3 * size * depth


def change_by_a_step(net, rate=1e-3):
    """How much one step of gradient descent on the matrices of the branches changes the logits, for each unit of rate.

    The readout is the same in all nets: where it starts at zero, no branch would move at the first step.
    """
    unembed = torch.randn(net.d_model, net.vocab_size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    weights = {**net.weights, "ends.unembed": unembed / math.sqrt(net.d_model)}
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    net = net.with_weights(leaves)
    tokens = net.tokenize(torch.arange(12).view(4, 3))
    logits = net.readout(net.forward(tokens))
    target = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    matrices = [name for name in leaves if name.split(".")[-1] in ("in", "out", "q", "k", "v", "o")]
    slopes = torch.autograd.grad((logits * target).mean(), [leaves[name] for name in matrices])
    moved = {name: leaves[name] - rate * slope for name, slope in zip(matrices, slopes, strict=True)}
    after = net.with_weights({name: value.detach() for name, value in {**leaves, **moved}.items()})
    return float((after.readout(after.forward(tokens)) - logits.detach()).norm()) / rate


def mlp_of(rule, depth, out_std=HE):
    branch = lab.Perceptron(64, "relu", (1.0, out_std))
    return lab.mlp(rule, depth=depth, width=32, branch=branch, ends=lab.Words(12))


def transformer_of(rule, layers):
    return lab.transformer(rule, layers=layers, width=16, ends=lab.Words(12))


@pytest.mark.parametrize("rule", ["fixup", "deep_norm"])
def test_the_first_update_of_an_mlp_does_not_grow_with_depth(rule):
    shallow, deep = (change_by_a_step(mlp_of(rule, depth)) for depth in (8, 128))
    assert 0.8 < deep / shallow < 1.25


@pytest.mark.parametrize("rule", ["t_fixup", "fixup", "deep_norm"])
def test_the_first_update_of_a_transformer_does_not_grow_with_depth(rule):
    shallow, deep = (change_by_a_step(transformer_of(rule, layers)) for layers in (4, 64))
    assert 0.5 < deep / shallow < 1.5


def test_the_first_update_grows_with_depth_where_a_start_does_not_bound_it():
    shallow, deep = (change_by_a_step(mlp_of("residual", depth, math.sqrt(2 / depth))) for depth in (8, 128))
    assert deep / shallow > 8  # the forward pass is bounded all the same: see the figures above
    shallow, deep = (change_by_a_step(transformer_of("post_ln", layers)) for layers in (4, 64))
    assert deep / shallow > 8


def test_t_fixup_needs_smaller_embeddings_too():
    changes = []
    for layers in (4, 64):
        net = transformer_of("t_fixup", layers)
        restored = net.weights["ends.embed"] * (9 * layers) ** 0.25
        changes.append(change_by_a_step(net.with_weights({**net.weights, "ends.embed": restored})))
    assert changes[1] / changes[0] > 2


def test_the_constants_of_deep_norm():
    """The figures that the paper's formulas give, to four decimals."""
    single, encoder, decoder = (
        lab.DeepNormScales.single(100),
        lab.DeepNormScales.encoder(12, 6),
        lab.DeepNormScales.decoder(6),
    )
    found = [value for scales in (single, encoder, decoder) for value in (scales.alpha, scales.beta)]
    assert [round(value, 4) for value in found] == [3.7606, 0.1880, 1.6862, 0.4179, 2.0598, 0.3433]


def factors_of(rule, base="residual", layers=8):
    """The factors on the weights of a layer, and on those at the ends, against a rule that has none."""
    net, plain = (lab.transformer(name, layers=layers, width=8) for name in (rule, base))
    return {
        name.removeprefix("3."): float((net.weights[name] / plain.weights[name]).mean())
        for name in plain.weights
        if name in ("ends.embed", "ends.unembed") or (name.startswith("3.") and plain.weights[name].ndim == 2)
    }


def test_which_weights_a_start_makes_smaller():
    """Eight layers, sixteen steps; perceptrons, values and outputs, never queries and keys."""
    ones = dict.fromkeys(("mlp.in", "mlp.out", "attn.q", "attn.k", "attn.v", "attn.o", "ends.embed", "ends.unembed"), 1)
    deep = (8 * 8) ** -0.25
    values = dict.fromkeys(("mlp.in", "mlp.out", "attn.v", "attn.o"))
    assert factors_of("deep_norm", "post_ln") == pytest.approx(ones | dict.fromkeys(values, deep))
    fixed = dict.fromkeys(values, 0.67 * 8**-0.25) | {"ends.embed": (9 * 8) ** -0.25 * 8**-0.5}
    assert factors_of("t_fixup") == pytest.approx(ones | fixed)
    last = dict.fromkeys(("mlp.out", "attn.o"), 16**-0.5)
    assert factors_of("gpt2_scaling", "pre_ln") == pytest.approx(ones | last)
    quarter = dict.fromkeys(("mlp.in", "attn.q", "attn.k", "attn.v"), 0.25)
    zeros = dict.fromkeys(("mlp.out", "attn.o", "ends.unembed"), 0)
    assert factors_of("fixup") == pytest.approx(ones | quarter | zeros)


def test_the_power_of_fixup_follows_the_number_of_matrices():
    """n^(-1 / (2 m - 2)): a half for two matrices, a quarter for three; the only matrix of a branch is the last."""
    place = lab.Place(step=0, steps=16, layer=0, layers=16, width=4, matrices=3, returned=4)
    assert lab.Fixup().gain("in", place) == pytest.approx(16**-0.25)
    net = small_mlp("fixup", branch=lab.Layer())
    tokens = net.tokenize(torch.tensor([[1, 2]]))
    assert torch.equal(net.forward(tokens), net.trunk(tokens).x0)


def test_a_sandwich_adds_as_much_whatever_its_branch_returns():
    for std in (0.1, 10.0):
        net = small_mlp("sandwich_ln", width=16, branch=lab.Perceptron(std=(1.0, std)))
        trunk = net.trunk(net.tokenize(torch.tensor([[1, 2, 5]])))
        written = trunk.write(net.design.sites[1], trunk.x0)
        assert (written.square().mean(-1) - 1).abs().max() < 0.02


def without_branches(rule, depth=10):
    """A net whose branches write nothing."""
    net = small_mlp(rule, depth=depth)
    return net.with_weights({name: 0 * value if ".out" in name else value for name, value in net.weights.items()})


def ends_of(net):
    tokens = net.tokenize(torch.tensor([[1, 2, 5]]))
    return net.trunk(tokens).x0, net.forward(tokens)


def test_what_the_trunk_itself_does_over_ten_steps():
    """With branches that write nothing: the powers of its factor, the product of its matrices, or nothing at all."""
    for rule, factor in ((lab.ScaledSkip(0.9), 0.9**10), (lab.DropoutSkip(0.2), 0.8**10), (lab.Plain(), 0.0)):
        x, final = ends_of(without_branches(rule))
        assert (final - factor * x).abs().max() < 1e-12
    net = without_branches("projected_skip")
    x, final = ends_of(net)
    matrices = [net.weights[f"{layer}.mlp.skip"] for layer in range(10)]
    assert (final - x @ torch.linalg.multi_dot(matrices)).abs().max() < 1e-10
    x, final = ends_of(without_branches("trunk_activation"))
    for _ in range(10):
        x = torch.tanh(x)
    assert torch.equal(final, x)


def test_a_gate_that_starts_closed_lets_the_stream_pass():
    errors = []
    for bias in (-3.0, -6.0, -12.0):
        x, final = ends_of(small_mlp(lab.GatedSkip(bias), depth=10))
        errors.append(float((final - x).norm() / x.norm()))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-3
