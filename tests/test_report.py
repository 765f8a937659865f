"""The report opens anywhere, says what was found, holds what was measured, and never replaces a whole one by half."""

from __future__ import annotations

import base64
import io
import itertools
import re
from contextlib import redirect_stderr, redirect_stdout
from html.parser import HTMLParser

import pandas as pd
import pytest
import xarray as xr

from resstream import report as report_module
from resstream.check import Check
from resstream.errors import MetricError, PromptError, ResultError, UnsupportedModelError
from resstream.report import MEASURES, report, save
from resstream.result import Result, open_result

CLEAN = "Mary & <script>x()</script> John: John saw"
CORRUPTED = "Mary & <script>x()</script> John: Mary saw"


class Page(HTMLParser):
    """The tags of a page, with their attributes, and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def all(self, name):
        return [attributes for tag, attributes in self.tags if tag == name]


def quick(patch):
    """The same measures on little, which is all that a page needs."""

    def faster(name, **options):
        measure = getattr(report_module, name)
        patch.setattr(report_module, name, lambda *args, **asked: measure(*args, **{**asked, **options}))

    faster("patch_activations", layers=[0, 29])
    faster("ablate_layers", layers=[0, 29])
    faster("lesion_curve", counts=[0, 1], samples=2)
    faster("path_lengths", unit="layer", start=28, samples=2, signs=2)
    faster("logit_by_path_length", gauge="direct")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the report goes: a folder that holds an older one, and something else."""
    folder = tmp_path_factory.mktemp("reports") / "report"
    folder.mkdir()
    for name in ("index.html", "logit_lens.nc", "notes.txt"):
        (folder / name).write_text(f"older {name}")
    return folder


@pytest.fixture(scope="module")
def written(smollm2, folder):
    """The one report that is made here, on prompts that hold markup, and what it said meanwhile."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        quick(patch)
        page = report(smollm2, CLEAN, CORRUPTED, " Mary", " John", folder, progress=True)
    return page, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def page(written):
    return written[0]


@pytest.fixture(scope="module")
def parsed(page):
    return Page(page.read_text(encoding="utf-8"))


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def fetches(parsed):
    """Everything that a browser would load, or follow, apart from data inside the page."""
    values = [value for _, attributes in parsed.tags for key, value in attributes.items() if key in ("src", "href")]
    return [value for value in values if not value.startswith(("data:", "#"))]


def test_the_page_is_alone_and_offline(page, parsed):
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"https?:|url\(|@import|//cdn", text)
    assert not {tag for tag, _ in parsed.tags} & {"script", "link", "iframe", "object", "base"}
    assert all(image["src"].startswith("data:image/png;base64,") for image in parsed.all("img"))
    assert all((page.parent / name).is_file() for name in fetches(parsed))


def test_a_fetch_would_be_noticed():
    assert fetches(Page('<img src="https://a.b/c.png"><a href="#here">')) == ["https://a.b/c.png"]


def test_everything_is_escaped(page, parsed):
    assert "&lt;script&gt;" in page.read_text(encoding="utf-8")
    assert "<script>x()</script>" in parsed.text
    assert not parsed.all("script")


def test_markup_that_is_not_escaped_would_be_noticed():
    assert Page("<p><script>alert('x')</script></p>").all("script")


@pytest.mark.parametrize("measure", MEASURES)
def test_each_measure_says_what_it_found_and_its_check(measure, page, parsed):
    result = open_result(page.with_name(f"{measure}.nc"))
    assert parsed.text.count(result.headline) == 2  # at the top, and over its picture
    assert f"check: {result.check}" in parsed.text
    assert result.measure == ("patch_activations" if measure == "patch_heads" else measure)


@pytest.mark.parametrize("measure", MEASURES)
def test_each_measure_leaves_a_picture_a_table_and_everything(measure, page):
    result = open_result(page.with_name(f"{measure}.nc"))
    frame = pd.read_csv(page.with_name(f"{measure}.csv"), keep_default_na=False, encoding="utf-8")
    assert len(frame) == len(result.to_dataframe())
    assert list(frame.columns) == list(result.to_dataframe().columns)
    assert page.with_name(f"{measure}.png").read_bytes().startswith(b"\x89PNG")


def test_the_pictures_on_the_page_are_the_files(page, parsed):
    images = parsed.all("img")
    for measure, image in zip(MEASURES, images, strict=True):
        data = base64.b64decode(image["src"].partition(",")[2])
        assert data == page.with_name(f"{measure}.png").read_bytes()


def test_the_page_can_be_read_without_seeing(parsed):
    assert all(len(image["alt"]) > 60 for image in parsed.all("img"))
    assert parsed.all("html") == [{"lang": "en"}]
    assert all(cell["scope"] in ("col", "row") for cell in parsed.all("th"))
    marked = {attributes["aria-labelledby"] for attributes in parsed.all("section")}
    assert marked <= {attributes.get("id") for attributes in parsed.all("h2")}


def test_the_page_shows_both_prompts_token_by_token(smollm2, parsed):
    tokens = smollm2.tokenize([CLEAN, CORRUPTED]).strings
    assert len(parsed.all("li")) == len(MEASURES) + sum(map(len, tokens))
    assert len([item for item in parsed.all("li") if item.get("class") == "differs"]) == 2


def test_the_page_shows_what_the_model_answers(smollm2, parsed):
    probabilities = smollm2.logits(CLEAN)[0, -1].detach().double().softmax(-1)
    ids = [smollm2.tokenizer(answer)["input_ids"][0] for answer in (" Mary", " John")]
    for token in ids:
        assert f"{float(probabilities[token]):.4f}" in parsed.text
    difference = float((probabilities[ids[0]] / probabilities[ids[1]]).log())
    assert f"{difference:+.3f}" in parsed.text


def test_the_page_says_how_to_make_it_again(smollm2, parsed):
    import torch

    assert torch.__version__ in parsed.text
    assert f"Residual stream report: {smollm2.name}" in parsed.text
    for command in ("report", "lens", "patch", "ablate", "ensemble", "lesion", "paths", "logit-paths"):
        assert f"resstream {command} " in parsed.text
    assert f"rs.logit_lens(model, {CLEAN!r}, sites=('embed', 'resid_post'), targets=' Mary')" in parsed.text
    assert f"report(model, clean={CLEAN!r}" in parsed.text


def test_what_it_says_how_to_make_again_is_what_it_made(page, parsed):
    """The layers of the ensemble are those that the ablation found to matter."""
    units = open_result(page.with_name("layer_ensemble.nc")).data.unit.values.tolist()
    assert units == ["0", "29"]
    assert "units=[0, 29], exact=True)" in parsed.text
    assert "--units 0,29 --exact" in parsed.text


def test_patching_is_asked_about_heads_too(smollm2, page, parsed):
    heads = open_result(page.with_name("patch_heads.nc")).data
    assert dict(heads.mean_effect.sizes) == {"site": 1, "layer": 2, "head": smollm2.n_heads}
    assert "sites=('head',), positions='all')" in parsed.text
    assert "--positions all --site head" in parsed.text


def test_an_older_report_is_replaced_and_nothing_else_is_left_behind(page, folder):
    expected = {"index.html", *(f"{measure}.{suffix}" for measure in MEASURES for suffix in ("png", "csv", "nc"))}
    assert set(contents(folder)) == expected | {"notes.txt"}
    assert (folder / "notes.txt").read_text() == "older notes.txt"
    assert "Residual stream report" in page.read_text(encoding="utf-8")
    assert list(folder.parent.iterdir()) == [folder]


def test_progress_goes_to_stderr(written):
    _, out, err = written
    assert out == ""
    assert f"{len(MEASURES)}/{len(MEASURES)}" in err
    assert "logit_by_path_length" in err


def test_an_error_midway_keeps_the_older_report(smollm2, tmp_path, monkeypatch):
    folder = tmp_path / "report"
    folder.mkdir()
    for name in ("index.html", "logit_lens.nc", "notes.txt"):
        (folder / name).write_text(f"older {name}")
    before = contents(folder)

    def fails(*_, **__):
        raise MetricError("no more")

    monkeypatch.setattr(report_module, "patch_activations", fails)
    with pytest.raises(MetricError, match="no more"):
        report(smollm2, "John saw", "Mary saw", out=folder, progress=False)
    assert contents(folder) == before
    assert list(tmp_path.iterdir()) == [folder]


def test_a_file_in_the_way_is_said_before_anything_runs(smollm2, tmp_path):
    (tmp_path / "report").write_text("mine")
    with pytest.raises(ResultError, match=r'report" is a file'):
        report("a model that is never loaded", out=tmp_path / "report")
    with pytest.raises(ResultError, match="cannot be written"):
        report(smollm2, out=tmp_path / "report" / "inside")
    assert (tmp_path / "report").read_text() == "mine"


def test_prompts_that_do_not_align_are_refused(smollm2, tmp_path):
    with pytest.raises(PromptError, match="does not align"):
        report(smollm2, "John and Mary", "Mary", out=tmp_path / "report", progress=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("b.csv", b"prompt,"), ("deep/c.nc", b"\x89HDF")])
def test_a_suffix_says_what_is_saved(name, start, page, tmp_path):
    save(open_result(page.with_name("ablate_layers.nc")), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_another_suffix_is_refused(page, tmp_path):
    with pytest.raises(ResultError, match=r"a\.xlsx.*\.png, \.pdf, \.svg, \.csv, \.nc"):
        save(open_result(page.with_name("ablate_layers.nc")), tmp_path / "a.xlsx")


# What the sections ask


def ablated(effects):
    data = xr.Dataset({"effect": (("prompt", "unit"), [effects])}, coords={"unit": [*map(str, range(len(effects)))]})
    return Result("ablate_layers", "toy", data, Check("one side = the other", 0.0, 1e-5), "found")


def test_the_ensemble_is_of_the_layers_that_matter_most():
    effects = [0.0, -9.0, 0.1, 3.0, *[0.5] * 8, -0.2]
    assert report_module._most_needed(ablated(effects)) == [1, 3, *range(4, 12)]
    assert report_module._most_needed(ablated([1.0, 2.0])) == [0, 1]


def test_a_model_without_a_frozen_form_gets_the_direct_gauge(smollm2, monkeypatch):
    assert report_module._gauge(smollm2) == "frozen"

    def refuses(*_):
        raise UnsupportedModelError("no frozen form")

    monkeypatch.setattr(type(smollm2), "frozen", refuses)
    found = {"ablate_layers": ablated([1.0] * 30)}
    question = report_module.Question(CLEAN, CORRUPTED, " Mary", " John")
    *_, last = report_module._sections(smollm2, question, "smollm2", found)
    assert "gauge='direct'" in last.python
    assert "--gauge direct" in last.command
    assert "do not become linear" in last.reading


def test_a_model_whose_heads_are_not_found_is_patched_by_branches(smollm2, monkeypatch):
    assert report_module._inside(smollm2) == ("head",)

    def refuses(*_):
        raise UnsupportedModelError("no heads")

    monkeypatch.setattr(type(smollm2), "require_inside", refuses)
    question = report_module.Question(CLEAN, CORRUPTED, " Mary", " John")
    asked = {each.name: each for each in itertools.islice(report_module._sections(smollm2, question, "smollm2", {}), 3)}
    section = asked["patch_heads"]
    assert "sites=('attn', 'mlp')" in section.python
    assert section.command.count("--site") == 2
    assert "attention and MLP branch" in section.reading
