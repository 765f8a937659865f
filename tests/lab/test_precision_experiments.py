"""Sums in low precision against a rounding of one's own, bit by bit, and the experiments that look at them."""

from __future__ import annotations

from importlib import import_module
from itertools import islice

import numpy as np
import pytest
import torch

from resstream.errors import LabError
from resstream.lab import experiments
from resstream.lab.experiments.parts import trunk_adds
from resstream.lab.experiments.parts.passages import passages
from resstream.measure.vitals.precision_drift import precision_drift

# The module, whose function has its name.
absorption = import_module("resstream.lab.experiments.layer_scale_absorption")
# Of bfloat16, float16 and float32: all bits of the significand, the first one included.
BITS = {"bfloat16": 8, "float16": 11, "float32": 24}


def rounded(x, bits):
    """The nearest number with so many bits, ties to even, of numbers that are not too small."""
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(fraction, bits)), exponent - bits)


def verdicts(result):
    return [claim["verdict"] for claim in result.settings["claims"]]


@pytest.mark.parametrize(("precision", "whole"), [("bfloat16", torch.int16), ("float16", torch.int16)])
def test_the_spacing_is_that_to_the_next_bit_pattern(precision, whole):
    x = (10 ** torch.linspace(-3, 3, 500, dtype=torch.float64)).to(trunk_adds.PRECISIONS[precision])
    above = (x.view(whole) + 1).view(x.dtype)
    expected = (above.double() - x.double()).numpy()
    assert (trunk_adds.spacing(x.double().numpy(), precision) == expected).all()


def test_the_spacing_of_float32_is_that_of_numpy():
    x = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    assert (trunk_adds.spacing(x.astype(float), "float32") == np.abs(np.spacing(x))).all()


@pytest.mark.parametrize("precision", trunk_adds.PRECISIONS)
def test_sums_are_rounded_to_the_nearest_number(precision, monkeypatch):
    assert trunk_adds.check_rounding(precision).passed
    honest = trunk_adds.spacing
    monkeypatch.setattr(trunk_adds, "spacing", lambda x, name: 2 * honest(x, name))
    assert not trunk_adds.check_rounding(precision).passed


def drift_by_hand(seed, adds, bits):
    source = trunk_adds.writes(seed, (4, 4096))
    exact = next(source).numpy()
    x = rounded(exact, bits)
    for write in islice(source, adds):
        exact = exact + write.numpy()
        x = rounded(x + write.numpy(), bits)
    return np.linalg.norm(x - exact) / np.linalg.norm(exact)


def test_a_bare_trunk_drifts_as_told_and_as_by_hand(smollm2):
    # Five seeds scatter by less than 1% at 24 and 96 additions, and by 2% at 384.
    found = experiments.bf16_drift(adds=[24, 96, 384], seeds=2, texts=1, model=smollm2)
    drift = found.data.drift.mean("seed").sel(trunk="bfloat16").values
    assert drift == pytest.approx([0.0074, 0.012, 0.024], rel=0.2)
    assert drift == pytest.approx(1.2e-3 * np.sqrt([24, 96, 384]), rel=0.1)
    at = found.data.drift.sel(adds=96, seed=1)
    for name, bits in BITS.items():
        assert at.sel(trunk=name).item() == pytest.approx(drift_by_hand(1, 96, bits), rel=1e-9)
        assert at.sel(trunk=name).item() != pytest.approx(drift_by_hand(1, 96, bits + 1), rel=0.1)
    end = found.data.drift.isel(adds=-1).mean("seed")
    assert end.sel(trunk="float32") < 6e-7
    assert end.sel(trunk="bfloat16, Kahan") < end.sel(trunk="bfloat16") / 5
    # Rounding once costs what the nearest number is away: 2^-9 on average over all significands, times 0.85.
    assert end.sel(trunk="float32, rounded once").item() == pytest.approx(1.7e-3, rel=0.05)
    assert set(verdicts(found)) == {"holds"}
    assert found.check.passed
    tokens = smollm2.tokenize(passages(1))
    plain = precision_drift(smollm2, tokens, torch.float16, None).trunk
    assert found.data.model_drift.sel(kind="float16 trunk").values == pytest.approx(plain[0], rel=1e-6)


def test_a_trunk_that_rounds_less_than_it_should_is_noticed(smollm2, monkeypatch):
    module = import_module("resstream.lab.experiments.bf16_drift")
    monkeypatch.setattr(module, "_kept", lambda trunk: torch.float16)
    found = experiments.bf16_drift(adds=[96], seeds=1, texts=1, model=smollm2)
    assert verdicts(found)[0] == "does not hold"


def absorbed_by_hand(scale, adds, seed, bits):
    first = rounded(next(trunk_adds.writes(seed, absorption.SHAPE)).numpy(), bits)
    x, still = first, np.ones(first.shape, bool)
    for write in islice(trunk_adds.writes(seed + 1000, absorption.SHAPE, scale), adds):
        x = rounded(x + write.numpy(), bits)
        still &= x == first
    return still.mean()


@pytest.mark.parametrize("scale", [1e-3, 1e-4])
def test_what_never_changes_is_what_a_rounding_by_hand_leaves(scale):
    unchanged, _ = absorption._absorbed(scale, 30, 0)
    assert unchanged[0] == absorbed_by_hand(scale, 30, 0, BITS["bfloat16"])
    assert unchanged[2] == absorbed_by_hand(scale, 30, 0, BITS["float32"])
    assert unchanged[0] != absorbed_by_hand(scale, 30, 0, BITS["bfloat16"] + 1)


def test_tiny_writes_are_absorbed_and_do_not_underflow():
    # Five seeds: 88.8% to 90.0% (95%).
    found = experiments.layer_scale_absorption(scales=(1e-1, 1e-4, 1e-6), seeds=2)
    unchanged = found.data.unchanged.mean("seed")
    assert unchanged.sel(trunk="bfloat16").values == pytest.approx([0, 0.90, 1], abs=0.02)
    assert (unchanged.sel(trunk="float32") < 1e-3).all()
    assert verdicts(found) == ["holds", "does not hold", "holds", "holds"]
    assert found.check.passed
    # What is lost of the sum is nearly all of it, where nearly nothing changes.
    assert found.data.lost.sel(trunk="bfloat16", scale=1e-6).min() > 0.95


def test_what_adds_nothing_is_refused(smollm2):
    with pytest.raises(LabError, match="adds nothing"):
        experiments.bf16_drift(adds=[0, 5], model=smollm2)
    with pytest.raises(LabError, match=r"scales=\[-1.0\]"):
        experiments.layer_scale_absorption(scales=[-1.0])
    with pytest.raises(LabError, match="adds=0"):
        experiments.layer_scale_absorption(adds=0)
    with pytest.raises(LabError, match='no precision "int8"'):
        trunk_adds.kept_in("int8")
