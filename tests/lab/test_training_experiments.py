"""Experiments that train: their steps against a plain loop, runs that diverge, and what each is to show in short."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from resstream import lab
from resstream.lab import experiments


def losses_by_hand(task, weights, depth, scale, rate, steps, momentum=0.9):
    """The losses of heavy-ball descent on x <- scale x + tanh(x W1 + b1) W2 + b2, with plain tensors."""
    weights = {name: value.clone().requires_grad_() for name, value in weights.items()}
    speed = {name: torch.zeros_like(value) for name, value in weights.items()}
    losses = []
    for _ in range(steps + 1):
        x = torch.tanh(task.ends.points @ weights["ends.embed"])
        for block in range(depth):
            first, b1, second, b2 = (weights[f"{block}.mlp.{name}"] for name in ("in", "in.bias", "out", "out.bias"))
            x = scale * x + torch.tanh(x @ first + b1) @ second + b2
        logits = x @ weights["ends.unembed"]
        loss = -logits.log_softmax(1)[range(len(x)), task.labels].mean()
        losses.append(loss.item())
        for name, slope in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
            speed[name] = momentum * speed[name] + slope
            weights[name] = (weights[name] - rate * speed[name]).detach().requires_grad_()
    return losses


def test_steps_of_the_skip_training_are_those_of_a_plain_loop():
    found = experiments.skip_training(scales=(0.9,), depth=6, steps=5)
    task = lab.rings(150, scale=1 / 3, head_std=0.3)
    net = lab.mlp(lab.ScaledSkip(0.9), depth=6, branch=lab.Perceptron(std=(0.5, 0.5)), ends=task.ends)
    rate = found.settings["rate"]
    assert found.data.loss[0, :, 0].values == pytest.approx(
        losses_by_hand(task, net.weights, 6, 0.9, rate, 5), rel=1e-10
    )
    for wrong in ({"scale": 0.91}, {"momentum": 0.8}):
        other = losses_by_hand(task, net.weights, **{"depth": 6, "scale": 0.9, "rate": rate, "steps": 5, **wrong})
        assert found.data.loss[0, :, 0].values != pytest.approx(other, rel=1e-6)


def test_a_run_that_diverges_ends_early_is_labelled_and_keeps_its_curve():
    found = experiments.skip_training(scales=(1.0, 1.5), depth=50, steps=30)
    gone, onset = (int(found.data[name].sel(skip_scale=1.5).item()) for name in ("diverged", "onset"))
    loss = found.data.loss.sel(skip_scale=1.5, seed=0).values
    assert 0 <= onset < gone < 30
    assert np.isfinite(loss[:gone]).all()
    assert loss[onset] > 1e3 >= loss[:onset].max(initial=0)
    assert np.isnan(loss[gone:]).all()
    assert np.isnan(found.data.diverged.sel(skip_scale=1.0)).all()
    assert "overflow at" in found.headline
    assert found.plot().get_lines()


def test_a_deep_stack_learns_with_a_factor_of_one_alone():
    found = experiments.skip_training(scales=(0.85, 1.0, 1.1), steps=50)
    # Seeds: nine in ten right by step 29 with 1.0, below 0.45 for ever with 0.85, above 1000 nats by step 5 with 1.1.
    learnt, left = (found.data.accuracy.sel(skip_scale=scale).max() for scale in (1.0, 0.85))
    assert float(learnt) > 0.9
    assert float(left) < 0.55
    assert found.data.onset.sel(skip_scale=1.1).item() < 30
    assert np.isnan(found.data.onset.sel(skip_scale=[0.85, 1.0])).all()


def test_plain_stacks_degrade_with_depth_and_residual_ones_do_not():
    found = experiments.depth_degradation(depths=(8, 48), steps=100, seeds=1)
    plain, residual = found.data.final[:, :, 0].values
    # Four seeds: 1.0 at 8, 0.49 to 0.51 at 48.
    assert plain[0] >= 0.99
    assert plain[1] == pytest.approx(0.502, abs=0.1)
    assert (residual >= 0.99).all()


def test_stacks_that_were_trained_with_layers_left_out_bear_their_loss():
    found = experiments.stochastic_depth(depth=8, steps=120, samples=3, seeds=1)
    lost = (found.data.loss.sel(deleted=2) - found.data.loss.sel(deleted=0)).sel(seed=0)
    # Three seeds of ten blocks, three deleted: 0.7 to 1.5 nats without, 0.02 to 0.1 with.
    assert float(lost.sel(rule="residual")) > 3 * float(lost.sel(rule="stochastic depth"))
    assert found.check.passed


def test_rules_that_start_as_the_identity_train_where_post_ln_does_not():
    found = experiments.zero_init_training(depth=40, steps=30, seeds=1)
    final = found.data.accuracy.max("step").sel(seed=0)
    assert (final.sel(rule=["ReZero", "SkipInit", "Fixup", "LayerScale"]) > 0.7).all()
    assert float(found.data.final.sel(rule="Post-LN", seed=0)) < 0.6
    assert found.check.passed
    assert {claim["row"] for claim in found.settings["claims"]} == {"D2", "D3", "D4", "D5"}
