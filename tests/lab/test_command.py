"""The lab's command: it lists the experiments, runs one, and says what became of its claims."""

from __future__ import annotations

import re
from inspect import signature

import pytest
from typer.testing import CliRunner

import resstream as rs
from resstream import cli
from resstream.lab.experiments import EXPERIMENTS


def run(*arguments):
    return CliRunner().invoke(cli.app, ["lab", *map(str, arguments)])


def test_without_a_name_it_lists_every_experiment_with_its_claims():
    text = run().output
    for name, each in EXPERIMENTS.items():
        assert re.search(rf"^ {name} +{re.escape(', '.join(each.rows))}", text, re.MULTILINE), name


def test_it_prints_the_claims_with_their_verdicts_and_writes_files(tmp_path):
    done = run("gradient_fan", "--short", "--seeds", 2, "--out", tmp_path / "fan.nc", "--out", tmp_path / "fan.png")
    assert done.exit_code == 0, done.output
    expected = rs.lab.experiments.gradient_fan(seeds=2)
    assert done.output.splitlines()[0] == repr(expected)
    for claim in expected.settings["claims"]:
        assert claim["found"] in done.output
    assert done.output.count("holds") == 3
    saved = rs.open_result(tmp_path / "fan.nc")
    assert saved.data.identical(expected.data)
    assert saved.settings["claims"] == expected.settings["claims"]
    assert (tmp_path / "fan.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gradient_van",), "gradient_fan"),
        (("gradient_fan", "--seeds", 0), "--seeds"),
        (("layer_ablation", "--seeds", 2), "no nets"),
    ],
)
def test_wrong_words_are_refused_with_what_there_is(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_takes_what_the_command_gives_it(name):
    known = signature(EXPERIMENTS[name].run).parameters
    assert "progress" in known, name
    assert set(EXPERIMENTS[name].short) <= set(known), name
    assert all(each.default is not each.empty for each in known.values()), name
