"""Comparisons against scipy and by hand, on patches and estimates of a tiny model and on planted grids."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import xarray as xr
from measure.test_patching import CLEAN, CORRUPTED, METRIC
from stream.test_read import ARCHITECTURES, says
from tiny import tokenizer

import resstream as rs
from resstream.check import Check
from resstream.errors import ResultError
from resstream.measure import comparison

OTHER = rs.logit_diff([7, 3, 2], 1)


@pytest.fixture(scope="module")
def toy():
    return rs.load(ARCHITECTURES["llama"](), name="toy", tokenizer=tokenizer())


@pytest.fixture(scope="module")
def patched(toy):
    return rs.patch_activations(toy, CLEAN, CORRUPTED, METRIC, sites=["attn", "mlp"])


@pytest.fixture(scope="module")
def estimated(toy):
    return rs.attribution_patching(toy, CLEAN, CORRUPTED, METRIC, sites=["attn", "mlp"])


def change(result, start="corrupted"):
    return (result.data.metric - result.data[start]).transpose("prompt", "site", "layer", ...)


def agrees(found, exact, estimate):
    """Both columns, and the three numbers by scipy and by numpy's least squares."""
    one, other = exact[~np.isnan(exact)], estimate[~np.isnan(exact)]
    assert np.allclose(found.exact.values[~np.isnan(exact)], one, rtol=0, atol=1e-12)
    assert np.allclose(found.estimated.values[~np.isnan(exact)], other, rtol=0, atol=1e-12)
    assert float(found.pearson) == pytest.approx(scipy.stats.pearsonr(one, other).statistic, abs=1e-12)
    assert float(found.spearman) == pytest.approx(scipy.stats.spearmanr(one, other).statistic, abs=1e-12)
    assert float(found.slope) == pytest.approx(float(np.linalg.lstsq(one[:, None], other, rcond=None)[0][0]), abs=1e-12)


def test_the_numbers_are_those_of_scipy(patched, estimated):
    result = rs.compare(patched, estimated)
    agrees(result.data, change(patched).values, change(estimated).values)
    assert result.data.exact.dims == patched.data.metric.dims
    assert result.data.token.equals(patched.data.token)
    assert result.check.passed
    assert (result.measure, result.model) == ("compare", "toy")


def test_numbers_that_are_off_are_noticed(patched, estimated, monkeypatch):
    """The twin of the test above: ranks in which equal values do not share theirs, a slope with a constant."""
    exact, estimate = change(patched).values, change(estimated).values
    monkeypatch.setattr(comparison, "_ranks", lambda values: values.argsort().astype(float))
    with pytest.raises(AssertionError):
        agrees(rs.compare(patched, estimated).data, exact, estimate)
    monkeypatch.undo()
    monkeypatch.setattr(comparison, "_change", lambda result: result.data.metric)
    with pytest.raises(AssertionError):
        agrees(rs.compare(patched, estimated).data, exact, estimate)


def test_ties_share_their_ranks(patched):
    """Left of the first difference all cells are 0, in both; many ties, then."""
    rounded = replace(patched, data=patched.data.assign(metric=patched.data.metric.round(3)))
    agrees(rs.compare(rounded, patched).data, change(rounded).values, change(patched).values)


def test_only_shared_cells_are_compared(toy):
    metric = rs.logit_diff(4, 7)
    patched = rs.patch_activations(toy, CLEAN, CORRUPTED, metric, sites=["attn", "mlp"])
    some = rs.attribution_patching(toy, CLEAN[:2], CORRUPTED[:2], metric, sites=["mlp"], layers=[2, 0])
    result = rs.compare(patched, some)
    assert list(result.data.site.values) == ["mlp"]
    assert sorted(result.data.layer.values) == [0, 2]
    assert result.data.sizes["prompt"] == 2
    exact = change(patched).sel(site=["mlp"], layer=result.data.layer.values).isel(prompt=[0, 1])
    agrees(result.data, exact.values, change(some).sel(layer=result.data.layer.values).values)
    assert result.data.token.values[1].tolist() == ["w9", "w8", "w7", "", ""]


def test_the_largest_miss_is_named(patched):
    metric = patched.data.metric.copy()
    metric[1, 0, 2, 1] += 100
    result = rs.compare(patched, replace(patched, data=patched.data.assign(metric=metric)))
    assert "largest miss +1e+02 at prompt 1, site attn, layer 2, position 1" in result.headline
    assert float(result.data.miss.max()) == pytest.approx(100)
    assert float(np.abs(result.data.miss).sum()) == pytest.approx(100)


def test_sizes_are_compared_with_sizes(toy, patched):
    sizes = rs.attribution_patching(toy, CLEAN, CORRUPTED, METRIC, sites=["attn", "mlp"], fix="drop")
    result = rs.compare(patched, sizes)
    agrees(result.data, np.abs(change(patched).values), np.abs(change(sizes).values))
    assert float(result.data.estimated.min()) >= 0
    assert result.settings["sizes"]
    assert result.settings["estimated"] == "attribution_patching (fix drop)"


def test_noising_starts_from_the_clean_run(toy):
    arguments = {"sites": "attn", "direction": "noise"}
    exact = rs.patch_activations(toy, CLEAN, CORRUPTED, METRIC, **arguments)
    estimate = rs.attribution_patching(toy, CLEAN, CORRUPTED, METRIC, steps=4, **arguments)
    result = rs.compare(exact, estimate)
    agrees(result.data, change(exact, "clean").values, change(estimate, "clean").values)
    assert result.settings["estimated"] == "attribution_patching (4 steps)"


def test_each_metric_has_its_own_numbers(toy):
    exact = rs.patch_activations(toy, CLEAN, CORRUPTED, [METRIC, OTHER], sites="mlp")
    estimate = rs.attribution_patching(toy, CLEAN, CORRUPTED, [METRIC, OTHER], sites="mlp")
    result = rs.compare(exact, estimate)
    for at in range(2):
        one, other = (
            (each.data.metric - each.data.corrupted).isel(metric_name=at).transpose("prompt", "site", "layer", ...)
            for each in (exact, estimate)
        )
        agrees(result.data.isel(metric_name=at), one.values, other.values)
    ax = result.plot(metric=OTHER.name)
    assert "3 answers" in ax.get_title(loc="left")


def test_what_does_not_vary_has_no_correlation(patched):
    still = replace(patched, data=patched.data.assign(metric=patched.data.metric * 0 + patched.data.corrupted))
    result = rs.compare(patched, still)
    assert result.data.pearson.isnull()
    assert result.data.spearman.isnull()
    assert float(result.data.slope) == 0
    json.dumps(result.settings, allow_nan=False)


def test_baselines_that_differ_fail_the_check(patched):
    moved = replace(patched, data=patched.data.assign(clean=patched.data.clean * 1.001))
    result = rs.compare(patched, moved)
    assert not result.check.passed
    assert (result.check.name, result.check.where) == ("both have the same baselines", "clean")
    failed = replace(patched, check=Check("given", 1.0, 0.5))
    assert rs.compare(failed, patched).check == failed.check


def test_it_is_saved_and_drawn(patched, estimated, tmp_path):
    result = rs.compare(patched, estimated)
    opened = rs.open_result(result.save(tmp_path / "agreement"))
    assert opened.data.identical(result.data)
    for prompt in (None, 1):
        ax = opened.plot(prompt=prompt)
        kinds = {each.get_label(): each.get_offsets() for each in ax.collections}
        assert set(kinds) == {"attn", "mlp"}
        data = result.data if prompt is None else result.data.isel(prompt=[prompt], position=slice(3))
        for kind, offsets in kinds.items():
            cells = data.sel(site=kind)
            shown = np.stack([cells.exact.values.ravel(), cells.estimated.values.ravel()], axis=1)
            assert np.array_equal(np.ma.filled(offsets, np.nan), shown, equal_nan=True)
        assert ax.get_xlabel() == "exact: change (logits)"
        assert "Pearson" in ax.get_title(loc="left")
        assert any(line.get_label() == "equal" for line in ax.lines)
    assert len(result.to_dataframe()) == 2 * 3 * (5 + 3 + 4)


def other_tokens(result):
    return replace(result, data=result.data.assign_coords(token=result.data.token.str.replace("w1", "w2")))


ERRORS = {
    "no patches": (lambda r: replace(r, data=r.data.drop_vars("clean")), ["has no 'clean'", "patch_activations"]),
    "no direction": (lambda r: replace(r, settings={}), ["has no 'direction'"]),
    "another model": (lambda r: replace(r, model="gpt2"), ["is of toy", "of gpt2", "on the same model"]),
    "direction": (
        lambda r: replace(r, settings={**r.settings, "direction": "noise"}),
        ["'denoise'", "'noise'", "patch the same way round in both"],
    ),
    "metric": (lambda r: replace(r, settings={**r.settings, "metric": "loss"}), ["'loss'", "measure the same metric"]),
    "window": (lambda r: replace(r, settings={**r.settings, "window": 3}), ["window 1", "window 3", "as many layers"]),
    "axes": (lambda r: replace(r, data=r.data.isel(position=0, drop=True)), ["the axes are", "the same kinds of site"]),
    "layers": (
        lambda r: replace(r, data=r.data.assign_coords(layer=[7, 8, 9])),
        ["no layer in common", "0, 1, 2", "7, 8, 9"],
    ),
    "numbers": (lambda r: replace(r, data=r.data.assign(metric=r.data.metric * np.nan)), ["no cell in common"]),
    "prompts": (other_tokens, ["the prompts are not the same", "tokens differ"]),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_to_type(case, patched):
    change_, parts = ERRORS[case]
    with pytest.raises(ResultError) as error:
        rs.compare(patched, change_(patched))
    assert says(error, *parts)


def test_positions_all_at_once_are_compared_too(toy):
    arguments = {"sites": "z", "positions": "all", "heads": [0, 3]}
    exact = rs.patch_activations(toy, CLEAN, CORRUPTED, METRIC, **arguments)
    result = rs.compare(exact, rs.attribution_patching(toy, CLEAN, CORRUPTED, METRIC, **arguments))
    assert result.data.exact.dims == ("prompt", "site", "layer", "head")
    assert isinstance(result.plot().get_title(loc="left"), str)
    assert isinstance(result.data, xr.Dataset)
