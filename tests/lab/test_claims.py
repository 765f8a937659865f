"""The page of claims: every row is there, and says what the last run of the experiments found."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from resstream.errors import LabError
from resstream.lab.experiments import EXPERIMENTS, experiment
from resstream.lab.experiments.parts.claims import AT_START, FAILS, HOLDS, Claim, judge, plain, within

DOCS = Path(__file__).parents[2] / "docs"
ROWS = {f"{letter}{n}" for letter, count in {"A": 5, "B": 2, "C": 8, "D": 11}.items() for n in range(1, count + 1)}


@pytest.fixture(scope="module")
def writer():
    """The script that writes the page, as a module."""
    spec = importlib.util.spec_from_file_location("claims_page", DOCS / "claims.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kept():
    return json.loads((DOCS / "claims.json").read_text(encoding="utf-8"))


def test_every_row_has_an_experiment_and_a_claim_on_the_page(kept):
    assert {row for each in EXPERIMENTS.values() for row in each.rows} == ROWS
    assert {claim["row"] for claims in kept.values() for claim in claims} == ROWS


def test_every_experiment_claims_the_rows_that_it_is_listed_with(kept):
    assert set(kept) == set(EXPERIMENTS)
    for name, each in EXPERIMENTS.items():
        assert {claim["row"] for claim in kept[name]} == set(each.rows), name


def test_the_page_is_what_the_script_writes_of_what_was_found(writer, kept):
    assert (DOCS / "claims.md").read_text(encoding="utf-8") == writer.page({name: kept[name] for name in EXPERIMENTS})


def test_the_page_shows_a_claim_that_does_not_hold_with_its_reason(writer):
    claim = Claim("B2", "a | b", "a paper", "1", "2", FAILS, "it is two")
    (line,) = [line for line in writer.page({"some": plain([claim])}).splitlines() if line.startswith("| B2")]
    assert line == r"| B2 | a \| b | a paper | `resstream lab some` | 1 | 2 | **does not hold**: it is two |"


def test_a_claim_that_does_not_hold_says_why(kept):
    for claim in [claim for claims in kept.values() for claim in claims]:
        assert claim["verdict"] in (HOLDS, AT_START, FAILS)
        assert claim["verdict"] == HOLDS or claim["because"], claim


def test_every_experiment_is_told_of_in_the_docs_with_its_picture():
    told = (DOCS / "experiments.md").read_text(encoding="utf-8")
    for name in EXPERIMENTS:
        assert f"\n## {name}\n" in told, name
        assert f"img/lab_{name}.png" in told, name
        assert (DOCS / "img" / f"lab_{name}.png").exists(), name


def test_verdicts_follow_from_numbers():
    assert (judge(True), judge(False)) == (HOLDS, FAILS)
    assert within(3.0, 4.0, 1.5)
    assert within(6.0, 4.0, 1.5)
    assert not within(6.1, 4.0, 1.5)
    assert not within(-3.0, 4.0, 1.5)


def test_an_unknown_experiment_is_refused_with_those_that_there_are():
    with pytest.raises(LabError, match="gradient_fan"):
        experiment("gradient_van")
