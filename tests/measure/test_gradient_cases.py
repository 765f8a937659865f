"""Attribution patching: its cells, labels, limits and errors."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from measure.test_gradients import CLOSE, agree, changes
from measure.test_patching import CLEAN, CORRUPTED, METRIC
from stream.test_read import ARCHITECTURES, says, unchecked
from tiny import state_of, tokenizer

import resstream as rs
from resstream.errors import MetricError, PromptError, SiteError
from resstream.measure.patches.estimates import estimates
from resstream.stream.memory import peak_bytes

OTHER = rs.logit_diff([7, 3, 2], 1)


@pytest.fixture(scope="module")
def toy():
    return rs.load(ARCHITECTURES["llama"](), name="toy", tokenizer=tokenizer())


@pytest.mark.parametrize("fix", [None, "qk", "drop"])
def test_choices_are_sums_over_the_cells(fix, toy):
    """Several positions, heads or neurons patched together; under a correction, sums are taken before it bends them."""
    each = rs.attribution_patching(toy, CLEAN, CORRUPTED, METRIC, sites=["q", "v"], heads=[3, 0], fix=fix)
    whole = changes(rs.attribution_patching(toy, CLEAN, CORRUPTED, METRIC, sites=["q", "v"], fix=fix))
    assert np.array_equal(changes(each), whole[:, :, :, [3, 0]], equal_nan=True)
    assert np.isnan(whole[:, 1, :, 2:]).all(), "two heads of values serve four of queries"
    some = rs.attribution_patching(toy, CLEAN, CORRUPTED, METRIC, sites="q", positions=[-1, 0], fix=fix)
    for row, length in enumerate((5, 3, 4)):
        assert np.array_equal(changes(some)[row], whole[row, :1][..., [length - 1, 0]])
    together = rs.attribution_patching(toy, CLEAN, CORRUPTED, METRIC, sites="q", positions="all", heads="all", fix=fix)
    assert together.data.metric.dims == ("prompt", "site", "layer")
    change = np.abs((together.data.metric - together.data.corrupted).values[:, 0])
    total = np.abs(np.nansum(whole[:, 0], axis=(-1, -2)))
    if fix == "drop":
        assert (change < total + 1e-6).all()
        assert (change < 0.9 * total).any(), "what single cells do may cancel in each pass"
    else:
        assert np.abs(change - total).max() < CLOSE * total.max()


def test_the_result_is_that_of_patching(toy, tmp_path):
    for arguments in ({"sites": "attn"}, {"sites": ["z", "k"]}, {"sites": "neuron", "neurons": [1, 5]}):
        exact = rs.patch_activations(toy, CLEAN, CORRUPTED, METRIC, **arguments).data
        result = rs.attribution_patching(toy, CLEAN, CORRUPTED, METRIC, **arguments)
        data = result.data
        assert {*data.data_vars} == {*exact.data_vars}
        assert all(data[name].dims == exact[name].dims for name in exact.data_vars)
        assert {*data.coords} == {*exact.coords}
        assert all(data[name].equals(exact[name]) for name in exact.coords)
        assert np.allclose(data.clean, exact.clean)
        assert np.allclose(data.corrupted, exact.corrupted)
        assert (data.metric.isnull() == exact.metric.isnull()).all()
        assert rs.open_result(result.save(tmp_path / "estimate")).data.identical(data)
        assert result.headline.startswith("estimated denoise: ")
        assert (result.settings["steps"], result.settings["fix"]) == (1, [])


@pytest.mark.parametrize("fix", [None, "drop"])
def test_several_metrics_are_the_metrics_one_by_one(fix, toy):
    both = rs.attribution_patching(toy, CLEAN, CORRUPTED, [METRIC, OTHER], sites=["attn", "mlp"], fix=fix)
    assert both.data.metric.dims == ("prompt", "metric_name", "site", "layer", "position")
    for at, metric in enumerate((METRIC, OTHER)):
        alone = rs.attribution_patching(toy, CLEAN, CORRUPTED, metric, sites=["attn", "mlp"], fix=fix)
        for name in alone.data.data_vars:
            one, other = alone.data[name].values, both.data[name].isel(metric_name=at).values
            assert np.nanmax(np.abs(one - other)) < 1e-5 * max(1, np.nanmax(np.abs(one))), name


@pytest.mark.parametrize("arguments", [{}, {"sites": ["q", "k"], "fix": ("qk", "drop")}, {"sites": "attn", "steps": 5}])
def test_little_memory_changes_nothing(arguments, toy):
    plenty = rs.attribution_patching(toy, CLEAN * 2, CORRUPTED * 2, rs.logit_diff(4, 7), **arguments)
    little = rs.attribution_patching(toy, CLEAN * 2, CORRUPTED * 2, rs.logit_diff(4, 7), memory=1, **arguments)
    agree(changes(little), changes(plenty))


def test_memory_is_a_limit(toy):
    """Many pairs take no more at once than they may, which is too little for all of them together."""
    limit = 3 * 2**17
    arguments = (toy, [CLEAN[0]] * 24, [CORRUPTED[0]] * 24, rs.logit_diff(4, 7))
    for steps in (1, 4):
        free = peak_bytes(lambda steps=steps: rs.attribution_patching(*arguments, sites="z", steps=steps))
        bound = peak_bytes(
            lambda steps=steps: rs.attribution_patching(*arguments, sites="z", steps=steps, memory=limit)
        )
        assert bound < limit < free, "and it is one that matters here"


@contextmanager
def training(hf_model):
    hf_model.train()
    try:
        yield
    finally:
        hf_model.eval()


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_it_works_wherever_it_is_called(around, toy):
    """Case 18, and everything is as it was, the training flag and the process included."""
    expected = changes(rs.attribution_patching(toy, CLEAN, CORRUPTED, METRIC, sites=["z", "q"], fix="qk"))
    with training(toy.hf_model), around():
        before = state_of(toy.hf_model)
        found = rs.attribution_patching(toy, CLEAN, CORRUPTED, METRIC, sites=["z", "q"], fix="qk")
        assert state_of(toy.hf_model) == before
    assert np.array_equal(changes(found), expected, equal_nan=True)


def test_half_precision_is_summed_in_float32():
    move, slope = torch.full((1, 4096, 2), 1.0, dtype=torch.bfloat16), torch.full((1, 1, 1, 4096, 2), 0.0078125)
    slope[..., 0, :] = 256
    found = estimates("attn", move, slope.bfloat16(), torch.ones(1, 1, 4096).bool())
    assert found.dtype is torch.float32
    assert float(found) == 2 * (256 + 4095 / 128)


def test_half_precision_models_work(toy):
    half = rs.load(ARCHITECTURES["llama"]().bfloat16(), name="half", tokenizer=tokenizer())
    full = changes(rs.attribution_patching(toy, CLEAN, CORRUPTED, METRIC, sites=["attn", "mlp"]))
    result = rs.attribution_patching(half, CLEAN, CORRUPTED, METRIC, sites=["attn", "mlp"])
    assert result.check.passed
    assert np.nanmax(np.abs(changes(result) - full)) < 0.1 * np.nanmax(np.abs(full))


ERRORS = {
    "steps": ({"steps": 0}, SiteError, "write steps=1"),
    "fix": ({"fix": "drops"}, SiteError, 'write "qk", "drop"'),
    "fix of nothing": ({"fix": "qk"}, SiteError, 'ask for sites=["q", "k"]'),
    "direction": ({"direction": "up"}, SiteError, 'write "denoise" or "noise"'),
    "site": ({"sites": "residual"}, SiteError, "choose from"),
    "head": ({"sites": "z", "heads": 4}, SiteError, "has heads 0-3"),
    "layer": ({"layers": 3}, SiteError, "has layers 0-2"),
    "metric": ({"metric": lambda logits: logits[:, -1].argmax(-1).float()}, MetricError, "has no gradient"),
    "prompts": ({"corrupted": ["w1"] * 3}, PromptError, "does not align"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_to_type(case, toy):
    arguments, error, message = ERRORS[case]
    pair = {"clean": CLEAN[0], "corrupted": CORRUPTED[0], "metric": rs.logit_diff(4, 7), **arguments}
    pair |= {"clean": CLEAN} if isinstance(pair["corrupted"], list) else {}
    before = state_of(toy.hf_model)
    with unchecked(), pytest.raises(error) as raised:
        rs.attribution_patching(toy, **pair)
    assert says(raised, message)
    assert state_of(toy.hf_model) == before


def test_pairs_that_agree_have_no_effect(toy):
    with pytest.warns(UserWarning, match="same metric"):
        result = rs.attribution_patching(toy, CLEAN[0], CLEAN[0], rs.logit_diff(4, 7), fix="drop")
    assert (result.data.metric == result.data.clean).all()
    assert result.data.effect.isnull().all()
