"""The picture of a stream's health: each panel shows its figures, and says so where there are none."""

from __future__ import annotations

from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure
from measure.faulty_nets import IDS, healthy, large_branches, rank_collapse
from typer.testing import CliRunner

import resstream as rs
from resstream import cli
from resstream.check import Check
from resstream.cli.tables import tables_of
from resstream.errors import ResultError
from resstream.plots import save_picture

PANELS = ("norm", "write", "gradient", "rank", "attention", "drift")


@pytest.fixture(scope="module")
def health():
    return rs.stream_health(healthy(), IDS, precision=("bfloat16", "float16"))


def lines_of(ax):
    return {line.get_label(): line.get_ydata() for line in ax.lines}


def test_a_figure_has_all_panels(health):
    ax = health.plot()
    titles = [each.get_title(loc="left") for each in ax.figure.axes]
    assert len(titles) == len(PANELS)
    assert "none of 9 pitfalls" in ax.figure.get_suptitle()
    assert "net" in ax.figure.get_suptitle()
    plt.close(ax.figure)


@pytest.mark.parametrize(
    ("panel", "label", "variable"),
    [
        ("norm", "position 0", "first_norm"),
        ("norm", "median of the others", "norm"),
        ("gradient", "gradient of the loss", "gradient_norm"),
        ("rank", "distance from the mean token", "rank_residual"),
        ("rank", "mean cosine of two tokens", "token_cosine"),
    ],
)
@pytest.mark.parametrize("prompt", [None, 1])
def test_a_panel_draws_its_figures(panel, label, variable, prompt, health):
    ax = Figure().add_subplot()
    assert health.plot(ax, panel=panel, prompt=prompt) is ax
    values = health.data[variable]
    expected = values.mean("prompt") if prompt is None else values.isel(prompt=prompt)
    assert np.allclose(lines_of(ax)[label], expected)
    assert "net" in ax.get_title(loc="left")
    assert ax.get_xlabel() == "layer"


def test_writes_attention_and_drift(health):
    axes = {panel: health.plot(Figure().add_subplot(), panel=panel) for panel in PANELS}
    sizes = health.data.ratio.mean("prompt").values
    assert np.allclose(lines_of(axes["write"])["attention"], sizes[0::2])
    assert np.allclose(lines_of(axes["write"])["MLP"], sizes[1::2])
    assert np.allclose(axes["write"].lines[0].get_xdata(), np.arange(12) + 0.25)
    entropy = health.data.entropy.mean(("prompt", "head"))
    assert np.allclose(lines_of(axes["attention"])["entropy, of what is possible"], entropy)
    drift = health.data.trunk_drift.sel(precision="float16").mean("prompt")
    assert np.allclose(lines_of(axes["drift"])["trunk alone in float16"], drift)
    assert "whole model in float16" not in lines_of(axes["drift"])


def test_what_was_not_measured_is_said():
    result = rs.stream_health(large_branches(), IDS, gradients=False, precision=())
    for panel, message in (("gradient", "no gradient was taken"), ("attention", "no attention pattern")):
        ax = result.plot(Figure().add_subplot(), panel=panel)
        assert message in ax.texts[0].get_text()
    short = rs.stream_health(healthy(), IDS[:, :2], precision=())
    assert "one token" in short.plot(Figure().add_subplot(), panel="rank").texts[0].get_text()


def test_a_failed_check_and_a_wrong_choice(health):
    failed = replace(health, check=Check("one = other", 1.0, 1e-5))
    assert "FAILED" in failed.plot(Figure().add_subplot()).get_title(loc="left").splitlines()[0]
    with pytest.raises(ResultError, match=r"panel='pie'.*'norm', 'write'"):
        health.plot(panel="pie")
    with pytest.raises(ResultError, match="no prompt 2"):
        health.plot(prompt=2)
    with pytest.raises(ResultError, match='needs the variable "norm"'):
        replace(health, data=health.data.drop_vars("norm")).plot()


def test_a_file_needs_no_pyplot(health, tmp_path):
    save_picture(health, tmp_path / "health.png", dpi=40)
    assert (tmp_path / "health.png").read_bytes().startswith(b"\x89PNG")
    assert not plt.get_fignums()


def test_the_table_says_what_to_do_about_what_was_found():
    (table,) = tables_of(rs.stream_health(rank_collapse(), IDS, gradients=False))
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["rank collapse"][0] == "FOUND"
    assert "To do: keep the skip" in rows["rank collapse"][1]
    assert rows["depth dilution"][0] == "no"
    assert "To do" not in rows["depth dilution"][1]


def test_the_command_line_says_the_same(smollm2, monkeypatch, tmp_path):
    monkeypatch.setattr("resstream.models.load", lambda source: smollm2)
    monkeypatch.chdir(tmp_path)
    text = "The Eiffel Tower is in Paris."
    asked = ["health", text, "--no-gradients", "--precision", "none", "--out", "h.nc", "--out", "h.csv"]
    said = CliRunner().invoke(cli.app, asked)
    assert said.exit_code == 0, said.output
    expected = rs.stream_health(smollm2, text, gradients=False, precision=())
    assert said.stdout.splitlines()[0] == repr(expected)
    assert "a polluting layer" in said.stdout
    assert rs.open_result("h.nc").data.identical(expected.data)
    refused = CliRunner().invoke(cli.app, ["health", text, "--precision", "int8"])
    assert refused.exit_code == 2
    assert "bfloat16" in refused.stderr


def test_a_table_has_one_row_for_each_state(health):
    frame = health.to_dataframe()
    assert len(frame) == health.data.sizes["prompt"] * health.data.sizes["site"]
    assert {"norm", "effective_rank", "gradient_norm"} <= {*frame.columns}
    assert np.isfinite(frame["norm"]).all()
