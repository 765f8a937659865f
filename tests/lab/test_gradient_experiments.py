"""Gradients of stacks against backpropagation written out by hand, and the experiments that look at them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import pytest
import torch

from resstream import lab
from resstream.errors import LabError
from resstream.lab import experiments
from resstream.lab.experiments.gradient_check import KINDS, errors_of
from resstream.lab.experiments.other_skips import other_skips
from resstream.lab.experiments.parts import slopes
from resstream.lab.experiments.parts.races import race, side_by_side
from resstream.lab.rules.base import Rule


def by_hand(net, task, *, skip=1.0, slip=1.0):
    """dL/dx at every boundary of x <- skip x + tanh(x W1) W2, or x <- tanh(x W), by loops; `slip` plants an error."""
    weights = {name: value.numpy() for name, value in net.weights.items()}
    x = np.tanh(task.ends.points.numpy() @ weights["ends.embed"])
    kept = []
    for block in range(net.n_layers):
        first = weights.get(f"{block}.mlp.in", weights[f"{block}.mlp.out"])
        kept.append(np.tanh(x @ first))
        x = kept[-1] if "0.mlp.in" not in weights else skip * x + kept[-1] @ weights[f"{block}.mlp.out"]
    scores = np.exp(x @ weights["ends.unembed"])
    error = scores / scores.sum(1, keepdims=True)
    error[np.arange(len(x)), task.labels.numpy()] -= 1
    gradients = [error / len(x) @ weights["ends.unembed"].T]
    for block in reversed(range(net.n_layers)):
        slope, out, above = slip * (1 - kept[block] ** 2), weights[f"{block}.mlp.out"], gradients[0]
        if "0.mlp.in" in weights:
            below = skip * above + ((above @ out.T) * slope) @ weights[f"{block}.mlp.in"].T
        else:
            below = (above * slope) @ out.T
        gradients.insert(0, below)
    return gradients


def apart(found, expected):
    """The largest difference between gradients at all boundaries, relative to the largest of each."""
    return max(
        float(np.abs(one[:, 0].numpy() - other).max() / np.abs(other).max())
        for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(
    ("rule", "branch", "skip"),
    [
        ("residual", lab.Perceptron(std=(0.5, 0.5)), 1.0),
        (lab.ScaledSkip(0.8), lab.Perceptron(std=(0.5, 0.5)), 0.8),
        ("plain", lab.Layer("tanh", 0.75), 0.0),
    ],
)
def test_gradients_at_all_boundaries_are_those_by_hand(rule, branch, skip):
    task = lab.spirals(30)
    net = lab.mlp(rule, depth=12, branch=branch, ends=task.ends)
    found = slopes.gradients_by_boundary(net, task)
    assert apart(found, by_hand(net, task, skip=skip)) < 1e-12
    assert apart(found, by_hand(net, task, skip=skip, slip=1.001)) > 1e-4
    if skip:
        assert apart(found, by_hand(net, task, skip=skip + 1e-3)) > 1e-4


def test_the_fan_is_as_told_within_a_factor_of_two():
    # Ten seeds scatter by a factor of 1.2 around their geometric mean.
    fan = experiments.gradient_fan(scales=(0.8, 1.0, 1.1), seeds=3)
    assert fan.data.ratio_mean.values == pytest.approx([1.3e-4, 3.6, 204], rel=1.0)
    assert (fan.data.ratio_mean.values > np.array([1.3e-4, 3.6, 204]) / 2).all()
    assert [claim["verdict"] for claim in fan.settings["claims"]] == ["holds"] * 3
    task = lab.spirals(300, scale=0.15)
    branch = lab.Perceptron(std=(0.5, 0.5))
    net = lab.mlp(lab.ScaledSkip(0.8), depth=50, branch=branch, ends=task.ends, seed=1)
    hand = [np.linalg.norm(each) for each in by_hand(net, task, skip=0.8)]
    assert fan.data.ratio.sel(skip_scale=0.8, seed=1).item() == pytest.approx(hand[0] / hand[-1], rel=1e-9)


def test_the_profile_falls_by_orders_without_a_skip_and_rises_with_one():
    found = experiments.gradient_profile(seeds=3)
    # Five seeds: plain 2.3e-10 to 7.8e-10 at the input (95%), residual 3.9e-4 to 6.2e-4.
    plain, residual = found.data.gradient_mean.values
    assert plain[0] == pytest.approx(2.0e-10, rel=4)
    assert plain[-1] == pytest.approx(9e-5, rel=0.5)
    assert 4 < residual[0] / residual[-1] < 8
    assert [claim["verdict"] for claim in found.settings["claims"]] == ["holds", "holds"]
    task = lab.spirals(900, head_std=0.75)
    net = lab.mlp("plain", depth=40, branch=lab.Layer("tanh", 0.75), ends=task.ends, seed=2)
    hand = [np.abs(each).mean() for each in by_hand(net, task)]
    assert found.data.gradient.sel(rule="plain", seed=2).values == pytest.approx(hand[::2], rel=1e-8)


def test_tanh_on_the_trunk_lets_the_gradient_decay_mildly():
    found = experiments.trunk_activation(seeds=3, trained=1, steps=1)
    # Five seeds: 0.30 to 0.42 with tanh on the trunk, 2.1 to 2.7 without (95%).
    on, off = (float(found.data.ratio_mean.sel(rule=f"tanh {where}")) for where in ("on the trunk", "in branches"))
    assert 0.2 < on < 0.6
    assert 1.8 < off < 3.2
    assert found.check.passed


def test_no_other_skip_passes_as_much_gradient_or_trains_as_well():
    found = other_skips(seeds=1, steps=60)
    ratio, loss = found.data.ratio[:, 0], found.data.final_loss[:, 0]
    assert int(ratio.argmax("rule")) == int(loss.argmin("rule")) == 0
    assert found.data.rule.values[0] == "identity"
    # A factor of 0.5 at each of 24 blocks, but for what the branches pass on.
    assert float(ratio.sel(rule="0.5 on both")) == pytest.approx(0.5**24, rel=2)
    assert found.settings["claims"][0]["verdict"] == "holds"
    assert found.check.passed


def test_every_rule_passes_the_gradient_check():
    found = experiments.gradient_check(entries=1, seeds=1)
    assert set(found.data.rule.values) == set(lab.RULES)
    assert found.check.passed
    assert found.settings["claims"][0]["verdict"] == "holds"


class Slipped(torch.autograd.Function):
    """The identity, with a slope that is a tenth of a percent too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, slope):
        return 1.001 * slope


@final
@dataclass(frozen=True)
class SlippedSkip(Rule):
    """The plain sum, whose branch has a wrong slope."""

    def write(self, y, x, weights):
        return Slipped.apply(y)


def test_a_slope_that_is_a_tenth_of_a_percent_off_fails_the_gradient_check(monkeypatch):
    assert errors_of(KINDS["MLP"](SlippedSkip(), 0), 2, 0)[1] > 5e-4
    assert errors_of(KINDS["MLP"]("residual", 0), 2, 0)[1] < 1e-4
    monkeypatch.setitem(lab.RULES, "slipped", SlippedSkip)
    assert not experiments.gradient_check(rules=["residual", "slipped"], entries=2, seeds=1).check.passed


def test_curves_of_runs_that_ended_early_go_on_as_nan():
    table = side_by_side([np.array([3.0, 2.0]), np.array([1.0, 1.0, 1.0, 1.0])], steps=3)
    assert np.isnan(table[:, 0]).tolist() == [False, False, True, True]
    assert not np.isnan(table[:, 1]).any()


@pytest.mark.parametrize("seeds", [0, -1, True])
def test_a_race_without_seeds_is_refused(seeds):
    with pytest.raises(LabError, match="seeds=5"):
        race("rule", ["plain"], lambda kind, seed: None, steps=1, seeds=seeds, progress=False)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda: experiments.gradient_profile(depth=7), "depth=40"),
        (lambda: experiments.gradient_profile(depth=-2), "from 1 on"),
        (lambda: experiments.depth_degradation(depths=(2, 5)), "even numbers"),
        (lambda: experiments.gradient_check(rules=["identity"]), "no residual rule"),
        (lambda: experiments.gradient_check(entries=0), "entries"),
        (lambda: experiments.euler_halving(counts=(8,)), "no slope"),
        (lambda: experiments.implicit_ensemble(depth=1), "depth=12"),
        (lambda: experiments.skip_training(steps=0), "steps=0"),
        (lambda: experiments.skip_training(scales=(float("nan"),), steps=1), "scale=nan"),
        (lambda: experiments.other_skips(seeds=0), "seeds=5"),
    ],
)
def test_what_makes_no_experiment_is_refused_with_what_would(run, said):
    with pytest.raises(LabError, match=said):
        run()
