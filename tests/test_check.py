"""A check passes if its error is a number within its tolerance, says so in words, and cannot be changed."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, asdict

import pytest

from resstream.check import Check


@pytest.mark.parametrize("error", [0.0, 1e-9, 1e-5])
def test_an_error_within_the_tolerance_passes(error):
    assert Check("a = b", error, 1e-5).passed


@pytest.mark.parametrize("error", [1.0001e-5, 1.0, float("inf"), float("nan")])
def test_any_other_error_fails(error):
    assert not Check("a = b", error, 1e-5).passed


def test_not_even_an_infinite_tolerance_lets_an_infinite_error_pass():
    assert not Check("a = b", float("inf"), float("inf")).passed
    assert not Check("a = b", float("nan"), float("inf")).passed


def test_in_words():
    assert repr(Check("a = b", 3e-8, 1e-5, "layer 3")) == "a = b: 3e-08 (ok)"
    assert repr(Check("a = b", 0.0123, 1e-5)) == "a = b: 0.012 (FAILED, allowed 1e-05)"
    assert repr(Check("a = b", 0.5, 1e-5, "layer 3")) == "a = b: 0.5 at layer 3 (FAILED, allowed 1e-05)"
    assert repr(Check("a = b", float("nan"), 1e-5)) == "a = b: nan (FAILED, allowed 1e-05)"


def test_a_value():
    check = Check("a = b", error=1e-8, tolerance=1e-5)
    assert check == Check("a = b", 1e-8, 1e-5, where="")
    assert hash(check) == hash(Check("a = b", 1e-8, 1e-5))
    assert Check(**asdict(check)) == check
    assert pickle.loads(pickle.dumps(check)) == check
    with pytest.raises(FrozenInstanceError):
        check.error = 0.0
