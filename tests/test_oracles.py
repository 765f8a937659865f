"""Patching against other libraries: what pyvene and nnsight find when they move the same activations."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.test_trunk import plant
from tiny import SUPPORTED, some_ids

import resstream as rs
from resstream.models.causal_lm import CausalLM, CausalTrunk

CLOSE = 1e-6  # logits, float32
CLEAN, CORRUPTED = (some_ids(1, 5, seed=seed) for seed in (1, 2))
POSITIONS, NEURONS = [1, 4], [0, 7, 40]
METRIC = rs.logit_diff(5, 9)
STREAM = ("resid_pre", "resid_post", "attn", "mlp")
HEADS = ("z", "q", "k", "v")
NAMES = ("gpt2", "llama", "mistral", "neox_parallel", "gemma2")
FEW = ("gpt2", "llama", "neox_parallel")
QUESTIONS = [
    *[("pyvene", kind, name) for kind in STREAM for name in NAMES],
    *[("pyvene", "z", name) for name in ("gpt2", "llama", "mistral", "neox_parallel")],
    *[("pyvene", kind, name) for kind in "qkv" for name in ("gpt2", "llama", "mistral")],
    *[("pyvene", "neuron", name) for name in ("gpt2", "llama")],
    *[("pyvene", f"path, {frozen} frozen", name) for frozen in ("all", "attn") for name in FEW],
    *[("nnsight", kind, name) for kind in ("resid_post", "lens") for name in FEW],
]


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    """All that the other libraries found, by library, question and model."""
    script = Path(__file__).parent / "other_libraries.py"
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@cache
def loaded(name: str) -> rs.ResidualModel:
    return rs.load(SUPPORTED[name](), name=name)


@pytest.fixture
def model(name):
    return loaded(name)


def patched(model: rs.ResidualModel, kind: str, **options: Any) -> np.ndarray:
    data = rs.patch_activations(model, CLEAN, CORRUPTED, METRIC, sites=kind, **options).data
    return data.metric[0, 0].values


def ours(model: rs.ResidualModel, question: str) -> np.ndarray:
    """Our answer to a question that the other libraries were asked."""
    if question in STREAM:
        return patched(model, question)
    if question in HEADS:
        return patched(model, question, positions=POSITIONS)
    if question == "neuron":
        return patched(model, question, neurons=NEURONS, positions=POSITIONS)
    if question == "lens":
        data = rs.logit_lens(model, CLEAN, sites="resid_post", targets=5).data
        return data.log_prob[0].values
    frozen = question.split()[1]
    data = rs.path_patching(
        model, CLEAN, CORRUPTED, METRIC, senders="head", receivers="logits", direction="denoise", frozen=frozen
    ).data
    return data.metric.values.reshape(model.n_layers, model.n_heads)


def apart(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    assert np.ptp(expected) > 1000 * CLOSE, "and patches do something"
    return float(np.abs(found - expected).max())


@pytest.mark.parametrize(("library", "question", "name"), QUESTIONS)
def test_equality_with_another_library(library, question, name, theirs, model):
    """Each cell of the grid, of the same random weights."""
    assert apart(ours(model, question), np.array(theirs[library][question][name])) < CLOSE


def test_every_question_is_compared(theirs):
    asked = {(library, kind, name) for library, kinds in theirs.items() for kind in kinds for name in kinds[kind]}
    assert asked == set(QUESTIONS)


@pytest.mark.parametrize("name", ["llama"])
@pytest.mark.parametrize(("library", "question"), [("pyvene", "resid_post"), ("pyvene", "v"), ("nnsight", "lens")])
@pytest.mark.parametrize(("owner", "method"), [(CausalTrunk, "layer"), (CausalLM, "readout")])
def test_a_planted_error_shows(owner, method, library, question, name, theirs, model, monkeypatch):
    """The twin of the test above: 0.1 % of the stream or of the logits."""
    plant(monkeypatch, owner, method)
    assert apart(ours(model, question), np.array(theirs[library][question][name])) > 10 * CLOSE


@pytest.mark.parametrize("name", ["llama"])
@pytest.mark.parametrize("kind", HEADS)
def test_another_head_is_another_answer(kind, name, theirs, model):
    expected = np.array(theirs["pyvene"][kind][name])
    assert apart(ours(model, kind)[:, ::-1], expected) > 1000 * CLOSE
