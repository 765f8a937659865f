"""Training: its steps against Adam by hand, what a diverging run leaves, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from stream.test_read import unchecked
from torch.nn.functional import cross_entropy

from resstream import lab
from resstream.errors import LabError

TASK = lab.rings(30)


def net_of(rule="residual", depth=2, ends=TASK.ends):
    return lab.mlp(rule, depth=depth, width=8, ends=ends)


def adam_by_hand(net, steps, rate):
    """The losses of so many steps of Adam, by its formulas (Kingma and Ba 2015, algorithm 1)."""
    weights = {name: value.clone().requires_grad_() for name, value in net.weights.items()}
    mean = {name: torch.zeros_like(value) for name, value in weights.items()}
    square = {name: torch.zeros_like(value) for name, value in weights.items()}
    losses = []
    for step in range(1, steps + 2):
        points = torch.tanh(TASK.ends.points @ weights["ends.embed"])
        x = points
        for layer in range(net.n_layers):
            hidden = torch.tanh(x @ weights[f"{layer}.mlp.in"] + weights[f"{layer}.mlp.in.bias"])
            x = x + hidden @ weights[f"{layer}.mlp.out"] + weights[f"{layer}.mlp.out.bias"]
        loss = cross_entropy(x @ weights["ends.unembed"], TASK.labels)
        losses.append(float(loss.detach()))
        for name, slope in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
            mean[name] = 0.9 * mean[name] + 0.1 * slope
            square[name] = 0.999 * square[name] + 0.001 * slope**2
            change = (mean[name] / (1 - 0.9**step)) / ((square[name] / (1 - 0.999**step)).sqrt() + 1e-8)
            weights[name] = (weights[name] - rate * change).detach().requires_grad_()
    return losses


def test_steps_are_those_of_adam():
    run = lab.train(net_of(), TASK, steps=5, rate=3e-3)
    assert run.loss == pytest.approx(adam_by_hand(net_of(), 5, 3e-3), rel=1e-9)
    assert run.loss != pytest.approx(adam_by_hand(net_of(), 5, 3.003e-3), rel=1e-9)


def test_the_net_that_is_given_stays_as_it_is():
    net = net_of()
    before = {name: value.clone() for name, value in net.weights.items()}
    run = lab.train(net, TASK, steps=3)
    assert all(torch.equal(net.weights[name], value) for name, value in before.items())
    assert not torch.equal(run.net.weights["0.mlp.in"], before["0.mlp.in"])
    assert not any(value.requires_grad for value in run.net.weights.values())


def test_a_run_that_diverges_keeps_its_curve_and_the_last_weights_that_were_finite():
    run = lab.train(net_of(lab.ScaledSkip(1.3), 50), TASK, steps=300, rate=0.05, method="momentum")
    assert run.diverged is not None
    assert run.onset is not None
    assert run.onset < run.diverged < 300
    assert len(run.loss) == len(run.accuracy) == run.diverged + 1
    assert np.isfinite(run.loss[:-1]).all()
    assert all(bool(value.isfinite().all()) for value in run.net.weights.values())


def test_a_run_that_converges_is_not_labelled_diverged():
    run = lab.train(net_of(), TASK, steps=150, rate=1e-2)
    assert (run.diverged, run.onset) == (None, None)
    assert run.first(1.0) is not None
    assert run.first(1.1) is None


def test_warm_up_makes_the_first_step_smaller():
    net = net_of()

    def moved(warmup):
        after = lab.train(net, TASK, steps=1, warmup=warmup).net.weights["0.mlp.in"]
        return float((after - net.weights["0.mlp.in"]).abs().max())

    assert moved(10) == pytest.approx(moved(0) / 10, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "sgd"}, '"adam" and "momentum"'),
        ({"steps": 0}, "steps=0"),
        ({"rate": 0.0}, "rate=0.0"),
        ({"rate": float("nan")}, "rate=nan"),
        ({"warmup": -1}, "warmup=-1"),
    ],
)
def test_what_makes_no_training_is_refused(options, said):
    with unchecked(), pytest.raises(LabError, match=said):
        lab.train(net_of(), TASK, **options)


@pytest.mark.parametrize("ends", [None, lab.rings(60).ends, lab.rings(30, seed=1).ends], ids=["words", "more", "other"])
def test_a_net_that_was_built_for_other_examples_is_refused(ends):
    with pytest.raises(LabError, match=r"built for other examples than those of rings.*ends=task\.ends"):
        lab.train(net_of(ends=ends), TASK, steps=1)


def test_a_net_that_was_built_for_the_same_examples_drawn_again_is_taken():
    assert lab.train(net_of(ends=lab.rings(30).ends), TASK, steps=1).diverged is None


def test_a_depth_below_one_is_refused_by_its_own_name():
    with pytest.raises(LabError, match="depth=-3"):
        lab.mlp(depth=-3)
