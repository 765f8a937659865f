"""Experiments on paths: paths against Jacobians by differences, deletions against other ways to leave layers out."""

from __future__ import annotations

import sys
from itertools import product
from math import comb

import numpy as np
import pytest
import torch

import resstream as rs
from resstream import lab
from resstream.errors import LabError
from resstream.lab import experiments
from resstream.lab.experiments.euler_halving import _ends
from resstream.lab.experiments.parts.jacobians import along_path, paths_of, through_all, write_jacobians
from resstream.lab.experiments.parts.shorter import without_layers
from resstream.sites import Site


@pytest.fixture(scope="module")
def task():
    return lab.spirals(30)


@pytest.fixture(scope="module")
def net(task):
    return lab.mlp("residual", depth=3, width=8, ends=task.ends)


def jacobian_by_differences(net, block, state):
    """dF/dx by moving each number of the state, one after the other."""
    trunk, step = net.trunk(net.tokenize(torch.tensor([[3]]))), 1e-5
    columns = []
    for number in range(len(state)):
        moved = [state.clone(), state.clone()]
        for place, sign in enumerate((1, -1)):
            moved[place][number] += sign * step
        up, down = (trunk.write(Site(block, "mlp"), each[None, None])[0, 0] for each in moved)
        columns.append((up - down) / (2 * step))
    return torch.stack(columns, dim=1)


def test_jacobians_are_those_by_differences_at_the_state_that_each_block_reads(net, task):
    trunk = net.trunk(net.tokenize(task.prompts[[4]]))
    x = trunk.x0
    for block, found in enumerate(write_jacobians(net, task.prompts[4])):
        assert torch.allclose(found, jacobian_by_differences(net, block, x[0, 0]), atol=1e-8)
        assert block == 0 or not torch.allclose(found, jacobian_by_differences(net, block, trunk.x0[0, 0]), atol=1e-3)
        x = trunk.layer(block, x)


def test_paths_are_all_choices_of_hop_or_pass_and_sum_to_the_product(net, task):
    assert {tuple(sorted(path)) for path in paths_of(3)} == {
        tuple(block for block, hop in enumerate(hops) if hop) for hops in product((0, 1), repeat=3)
    }
    jacobians, top = write_jacobians(net, task.prompts[0]), torch.arange(8, dtype=torch.float64)
    eye = torch.eye(8, dtype=torch.float64)
    whole = top @ (eye + jacobians[2]) @ (eye + jacobians[1]) @ (eye + jacobians[0])
    terms = {path: along_path(jacobians, path, top) for path in paths_of(3)}
    assert torch.allclose(terms[0, 2], top @ jacobians[2] @ jacobians[0])
    assert not torch.allclose(terms[0, 2], top @ jacobians[0] @ jacobians[2])
    assert torch.allclose(sum(terms.values()), whole, rtol=1e-12)
    assert torch.allclose(through_all(jacobians, top), whole, rtol=1e-12)


def test_eight_paths_of_three_blocks_and_a_gradient_that_falls_below_one():
    found = experiments.path_expansion()
    assert found.data.sizes["path"] == 8
    assert found.data["hops"].values.tolist() == [0, 1, 1, 1, 2, 2, 2, 3]
    assert found.data["share"].sum("path").values == pytest.approx(np.ones(5), abs=1e-12)
    assert found.check.passed
    assert (found.data.pulled.diff("boundary") > 0).all()
    assert [claim["verdict"] for claim in found.settings["claims"]] == ["holds", "does not hold"]


def test_jacobians_at_the_wrong_states_do_not_sum_to_the_gradient(monkeypatch):
    def all_at_the_input(net, prompt):
        return [write_jacobians(net, prompt)[0]] * net.n_layers

    monkeypatch.setattr(sys.modules[experiments.path_expansion.__module__], "write_jacobians", all_at_the_input)
    assert not experiments.path_expansion(seeds=1).check.passed


def test_a_net_without_layers_is_the_net_with_their_writes_left_out(task):
    net = lab.mlp("residual", depth=5, ends=task.ends)
    ids = net.tokenize(task.prompts)
    for gone in ([0], [2, 4], [0, 1, 2, 3]):
        left = without_layers(net, gone)
        trunk = net.trunk(ids)
        x = trunk.x0
        for layer in range(5):
            x = x if layer in gone else trunk.layer(layer, x)
        assert torch.equal(left.forward(left.tokenize(task.prompts)), x)
    cut = rs.ablate_layers(net, task.answered[:4], layers=[1], metric=rs.loss()).data.metric.values[:, 0]
    left = without_layers(net, [1])
    scores = left.readout(left.forward(left.tokenize(task.prompts[:4]))[:, 0], range(3))
    loss = torch.nn.functional.cross_entropy(scores, task.labels[:4], reduction="none")
    assert cut == pytest.approx(loss.numpy(), rel=1e-9)
    with pytest.raises(LabError, match="keep a layer"):
        without_layers(net, range(5))


def test_deleting_a_layer_costs_a_plain_stack_more_and_moves_the_other_paths_of_a_tanh_stack_alone():
    found = experiments.implicit_ensemble(depth=8, steps=120, seeds=1)
    one = found.data.accuracy.sel(deleted=1, seed=0)
    # Three seeds: residual 0.80 to 0.95, plain 0.25 to 0.45, with one of 8 to 12 layers deleted.
    assert float(one.sel(rule="residual")) > 0.7
    assert float(one.sel(rule="plain")) < 0.6
    assert float(found.data.change.sel(net="linear").max()) < 1e-10
    assert float(found.data.change.sel(net="tanh, trained").mean()) > 0.1
    assert found.check.passed


def test_path_lengths_count_as_a_binomial_and_carry_as_no_such_thing():
    found = experiments.path_length_counts(depth=20, steps=60, points=3, seeds=1)
    assert found.data.counted.values == pytest.approx([comb(20, length) / 2**20 for length in range(21)])
    carried = found.data.carried[0]
    assert float(carried.sum()) == pytest.approx(1)
    # Three seeds, 54 blocks: a mean length of 6.6 to 7.1. Here a third of the half depth, by the same branches.
    assert float((carried * found.data.path_length).sum()) < 6
    assert found.check.passed


def test_the_papers_share_of_paths_is_the_sum_of_binomials():
    assert sum(comb(54, length) for length in range(5, 18)) / 2**54 == pytest.approx(0.004537, abs=5e-7)


def test_smooth_weights_make_euler_steps_and_independent_ones_do_not():
    found = experiments.euler_halving(counts=(16, 32, 64), seeds=3)
    smooth, scaled, rooted = found.data.slope.mean("seed").values
    # Five seeds: -1.00 to -0.98 where smooth, within 0.12 of 0 where not.
    assert smooth == pytest.approx(-1, abs=0.1)
    assert abs(rooted) < 0.4
    assert abs(scaled) < 0.5
    # With 1/n, independent writes average out, as 1/sqrt(n).
    moved = found.data.moved.mean("seed").sel(kind="independent weights, 1/n").values
    assert moved[0] / moved[-1] == pytest.approx(2, rel=0.35)
    assert found.check.passed


def test_the_smooth_net_is_euler_steps_of_a_flow_by_hand():
    start, end = _ends("smooth weights, 1/n", 24, seed=0)
    rng = torch.Generator().manual_seed(0)
    parts = 1.5 / (32 * 3) ** 0.5 * torch.randn(2, 3, 32, 32, generator=rng, dtype=torch.float64)

    def flow(x, t):
        waves = np.array([1.0, 2**0.5 * np.cos(2 * np.pi * t), 2**0.5 * np.sin(2 * np.pi * t)])
        first, second = (sum(wave * part for wave, part in zip(waves, each, strict=True)) for each in parts.numpy())
        return np.tanh(x @ first) @ second

    x = start.numpy()
    for step in range(24):
        x = x + flow(x, step / 24) / 24
    assert end.numpy() == pytest.approx(x, abs=1e-12)
    # A finer method of another kind, midpoint steps, ends nearby, at a distance of order 1/n.
    y = start.numpy()
    for step in range(400):
        y = y + flow(y + flow(y, step / 400) / 800, (step + 0.5) / 400) / 400
    ends = {steps: _ends("smooth weights, 1/n", steps, seed=0)[1].numpy() for steps in (32, 64)}
    errors = [np.linalg.norm(ends[steps] - y) for steps in (32, 64)]
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.15)
