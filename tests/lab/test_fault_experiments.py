"""Nets with one fault each, and blocks with switches: what is found, and what is noticed where it is not so."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from resstream import lab
from resstream.errors import LabError
from resstream.lab import experiments
from resstream.lab.experiments.parts import faults

# The modules, whose functions have their names.
pitfalls, switchable = (import_module(f"resstream.lab.experiments.{name}") for name in ("pitfalls", "switchable_block"))


def verdicts(result):
    return [claim["verdict"] for claim in result.settings["claims"]]


def test_each_fault_is_named_and_no_other():
    # Five seeds: all 45 nets.
    found = experiments.pitfalls(seeds=1)
    names = [name for name in found.data.pitfall.values if name != "shape mismatch"]
    table = found.data.found[..., 0].sel(net=[*names, "none"])
    assert (table.sel(pitfall=names).values == np.eye(9, 8)).all()
    assert not table.sel(pitfall="shape mismatch").any()
    assert set(verdicts(found)) == {"holds"}
    assert found.check.passed
    assert found.headline == "9 of 9 nets are named by their fault and by no other"


def test_a_fault_that_is_not_there_is_not_found(monkeypatch):
    monkeypatch.setitem(faults.FAULTS, "rank collapse", faults.FAULTS["none"])
    monkeypatch.setattr(pitfalls, "polluted", lambda sound, seed: sound)
    monkeypatch.setattr(pitfalls, "refused", lambda: "")
    assert verdicts(experiments.pitfalls(faults=["rank collapse"], seeds=1)) == ["does not hold"] * 3


def loss_of(net, ids):
    with torch.no_grad():
        logits = net.own_logits(net.tokenize(ids))
    return float(cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


def test_losses_of_the_polluted_net_are_those_of_nets_with_other_weights():
    sound = faults.trained(0)
    sick = faults.polluted(sound, 0)
    without, patched = pitfalls._losses(0)
    for layer in (2, faults.POLLUTED):
        silent = {
            name: 0 * value if name.startswith(f"{layer}.mlp.out") else value
            for name, value in sick.net.weights.items()
        }
        assert without[layer] == pytest.approx(loss_of(sick.net.with_weights(silent), sick.prompts), rel=1e-9)
        assert without[layer] != pytest.approx(loss_of(sick.net, sick.prompts), rel=1e-3)
    # Below the layer of noise both nets are the same, and with its write from the sound net all of it is.
    assert patched[: faults.POLLUTED] == pytest.approx([loss_of(sick.net, sick.prompts)] * faults.POLLUTED, rel=1e-9)
    assert patched[faults.POLLUTED] == pytest.approx(loss_of(sound.net, sound.prompts), rel=1e-9)
    assert int(np.argmin(without)) == int(np.argmin(patched)) == faults.POLLUTED


def test_a_write_of_another_shape_is_refused_whichever_way_it_comes():
    net = lab.transformer(layers=4)
    short = {**net.weights, "3.mlp.out": net.weights["3.mlp.out"][:, :1]}
    with pytest.raises(LabError, match=r"3.mlp.out has shape \(256, 1\)"):
        net.with_weights(short)
    with pytest.raises(LabError, match='"mlp" branches return 1 numbers'):
        lab.transformer(layers=4, branch=lab.Perceptron(out=1))


def test_all_settings_of_a_block_train_and_projections_fit_what_else_is_refused(monkeypatch):
    # Three seeds, six blocks, 150 steps: all of 54 nets get every point right.
    found = experiments.switchable_block(depth=2, steps=150, seeds=1)
    assert verdicts(found) == ["holds", "holds"]
    assert found.data.refused.values.tolist() == [True, True, False, False]
    assert "which Switchable" in found.settings["refusal"]
    assert "projection=True" in found.settings["refusal"]
    assert found.check.passed
    monkeypatch.setattr(switchable, "SWITCHES", {"plain": {"projection": True}, "projection": {}, "both": {}})
    assert verdicts(experiments.switchable_block(depth=2, steps=1, seeds=1)) == ["does not hold"] * 2


def test_a_setting_that_diverges_does_not_train(monkeypatch):
    monkeypatch.setattr(switchable, "RATE", 1e6)
    found = experiments.switchable_block(depth=2, steps=30, seeds=1)
    assert verdicts(found)[0] == "does not hold"


def test_what_cannot_be_built_is_refused():
    with pytest.raises(LabError, match="'rank collapse'"):
        experiments.pitfalls(faults=["bad luck"])
    with pytest.raises(LabError, match="seeds=0"):
        experiments.pitfalls(seeds=0)
    with pytest.raises(LabError, match="depth=0"):
        experiments.switchable_block(depth=0, seeds=1)
