"""Attention that collapses, layers that are removed, writes that are read far away: against loops and plain hooks."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
import torch
import xarray as xr
from torch.nn.functional import cross_entropy

from resstream import lab
from resstream.check import Check
from resstream.errors import LabError, SiteError
from resstream.lab import experiments
from resstream.lab.experiments.parts.at_start import random_words
from resstream.lab.experiments.parts.passages import passages

# The modules, whose functions have their names.
collapse, gradients, bus = (
    import_module(f"resstream.lab.experiments.{name}")
    for name in ("attention_collapse", "parts.attention_gradient", "stream_bus")
)


def verdicts(result):
    return [claim["verdict"] for claim in result.settings["claims"]]


def residuals_by_hand(seed, layers, *, skip=0.0):
    """How far tokens differ from their mean after each layer of attention alone, token by token."""
    net = collapse._net(collapse.KINDS["attention alone"], 0, seed)
    w = {name: value.numpy() for name, value in net.weights.items()}
    found = []
    for ids in random_words(4, 32, seed=seed).ids.numpy():
        x, own = w["ends.embed"][ids], []
        for layer in range(layers):
            parts = []
            for q, k, v in zip(*(np.split(x @ w[f"{layer}.attn.{name}"], 4, 1) for name in "qkv"), strict=True):
                rows = [np.exp(k @ query / 4) for query in q]
                parts.append(np.array([row @ v / row.sum() for row in rows]))
            x = (skip * x + np.concatenate(parts, 1) @ w[f"{layer}.attn.o"]) @ w[f"{layer}.mlp.out"]
            some = x[1:-1]
            own.append(np.linalg.norm(some - some.mean(0)) / np.linalg.norm(some))
        found.append(own)
    return np.mean(found, 0)


def test_each_net_shows_its_own_collapse_and_no_other():
    # Five seeds: skips keep 0.74 to 0.83, sharp scores an entropy of 0.040, deep nets writes of 0.081 to 0.087 (95%).
    found = experiments.attention_collapse(depth=80, seeds=2)
    gone = (found.data.left.mean("seed") < collapse.LEAST).values
    assert gone.tolist() == [[name == own for name in collapse.MEASURES] for _, own in collapse.NETS.values()]
    doubly, skips, mlps, apart, stuck, scaled = verdicts(found)
    assert (doubly, skips, mlps, apart, stuck, scaled) == ("holds", "holds", "does not hold", "holds", "holds", mlps)
    alone = found.data.residual.sel(kind="attention alone", seed=1).values
    assert alone[1:4] == pytest.approx(residuals_by_hand(1, 3), rel=1e-5)
    assert alone[1:4] != pytest.approx(residuals_by_hand(1, 3, skip=1e-3), rel=1e-3)
    assert found.check.passed


def test_nets_that_do_not_collapse_are_not_said_to(monkeypatch):
    monkeypatch.setattr(collapse, "_net", lambda kind, depth, seed: lab.transformer(layers=8, seed=seed))
    doubly, _, mlps, apart, stuck, _ = verdicts(experiments.attention_collapse(seeds=1))
    assert (doubly, mlps, apart, stuck) == ("does not hold", "holds", "does not hold", "does not hold")


def test_the_gradient_of_scores_is_that_of_autograd(monkeypatch):
    scores = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    pattern = scores.softmax(-1)
    (slope,) = torch.autograd.grad((pattern**3).sum(), scores)
    assert torch.allclose(gradients.through_softmax(pattern.detach(), 3 * pattern.detach() ** 2), slope, rtol=1e-12)
    net, sample = lab.transformer(layers=2, width=16), random_words(2, 6)
    assert gradients.attention_gradient(net, sample).check.passed
    honest = gradients.through_softmax
    monkeypatch.setattr(gradients, "through_softmax", lambda *args: 1.001 * honest(*args))
    assert not gradients.attention_gradient(net, sample).check.passed


def test_what_removed_branches_cost_is_what_plain_hooks_say(smollm2):
    # Six texts: the median layer costs 0.00 to 0.09 nats, layer 1 between 2.8 and 4.9.
    found = experiments.layer_ablation(layers=[1, 3, 6, 9, 12, 15, 18, 21, 24, 27], texts=1, model=smollm2)
    ids = smollm2.tokenizer(passages(1), return_tensors="pt").input_ids

    def loss():
        with torch.no_grad():
            logits = smollm2.hf_model(ids, use_cache=False).logits
        return float(cross_entropy(logits[0, :-1], ids[0, 1:]))

    base = loss()
    for layer in (1, 15):
        block = smollm2.hf_model.model.layers[layer]
        for branch, module in (("attn", block.self_attn), ("mlp", block.mlp)):
            handle = module.register_forward_hook(
                lambda _, __, output: (0 * output[0], *output[1:]) if isinstance(output, tuple) else 0 * output
            )
            own = found.data.effect.sel(branch=branch, layer=layer).item()
            assert own == pytest.approx(loss() - base, abs=1e-4)
            handle.remove()
            assert own != pytest.approx(loss() - base, abs=1e-4)
    assert verdicts(found) == ["holds", "does not hold", "holds"]
    assert found.settings["claims"][1]["found"].startswith("layer 1 ")


def matrix(sizes, layers):
    names = [f"{layer}.mlp" for layer in layers]
    effect = xr.DataArray(sizes, dims=("sender", "receiver"), coords={"sender": names, "receiver": names})
    return bus.Matrix(
        effect.assign_coords(above=("receiver", layers), below=("sender", layers)), Check("given", 0.0, 0.0)
    )


def test_shares_are_sums_by_hand():
    given = matrix(np.array([[0, 2, 3.0], [0, 0, 5], [0, 0, 0]]), [0, 1, 2])
    assert bus.share_by_distance(given, np.arange(4)).tolist() == pytest.approx([0, 0.7, 0.3, np.nan], nan_ok=True)
    assert bus.share_from_early(given) == 3 / 8


def test_late_layers_read_early_writes_and_only_through_a_skip(smollm2, monkeypatch):
    # Three pairs: 10% to 30% of what late layers read is from the first third (95%).
    found = experiments.stream_bus(layers=[0, 5, 10, 15, 20, 25, 29], seeds=1, model=smollm2)
    plain = found.data.share.sel(net="plain", seed=0).dropna("distance").values
    assert plain[1] == 1
    assert plain[2:].tolist() == [0.0] * (bus.LAB_DEPTH - 2)
    assert found.data.share.sum("distance").values == pytest.approx(1)
    assert 0.1 < found.data.early.sel(net="smollm2").item() < 0.4
    assert verdicts(found) == ["holds", "holds"]
    assert found.check.passed
    honest = bus._of_toy
    monkeypatch.setattr(bus, "_of_toy", lambda rule, seed: honest("residual", seed))
    monkeypatch.setattr(bus, "_of_model", lambda *args: honest("plain", 0))
    assert verdicts(experiments.stream_bus(seeds=1, model=smollm2)) == ["does not hold"] * 2


def test_what_cannot_be_asked_is_refused(smollm2):
    with pytest.raises(LabError, match="seeds=5: there are 4 pairs"):
        experiments.stream_bus(seeds=5, model=smollm2)
    with pytest.raises(SiteError, match="31"):
        experiments.stream_bus(layers=[31], seeds=1, model=smollm2)
    with pytest.raises(LabError, match="texts=0"):
        experiments.layer_ablation(texts=0, model=smollm2)
    with pytest.raises(LabError, match="no attention"):
        gradients.attention_gradient(lab.mlp(depth=2), random_words(2, 4))
    with pytest.raises(LabError, match="layers=0"):
        experiments.attention_collapse(depth=0, seeds=1)
