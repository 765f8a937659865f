"""What a setting of the lab must be, said in a sentence where it is not."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real

from resstream.errors import LabError, listed


def whole(name: str, value: object, least: int = 1) -> None:
    """Refuse what is no whole number, or one that is too small.

    >>> whole("layers", 2.5)
    Traceback (most recent call last):
    resstream.errors.LabError: layers=2.5 makes no net; give a whole number from 1 on, such as layers=8

    Raises:
        LabError: naming the setting and a value that would do.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise LabError(
            f"{name}={value!r} makes no net; give a whole number from {least} on, such as {name}={max(8, least)}"
        )


def share(name: str, value: object, *, above_zero: bool = False) -> None:
    """Refuse what is no number between 0 and 1.

    >>> share("rate", 1.5)
    Traceback (most recent call last):
    resstream.errors.LabError: rate=1.5 is no probability; give a number from 0 to 1, such as rate=0.5

    Raises:
        LabError: naming the setting and a value that would do.
    """
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not 0 <= float(value) <= 1 or (above_zero and value == 0):  # type: ignore[arg-type]
        span = "a number above 0 and up to 1" if above_zero else "a number from 0 to 1"
        raise LabError(f"{name}={value!r} is no probability; give {span}, such as {name}=0.5")


def number(name: str, value: object) -> None:
    """Refuse what is no finite number.

    >>> number("scale", float("nan"))
    Traceback (most recent call last):
    resstream.errors.LabError: scale=nan is no number that a net could use; give a finite one, such as scale=1.0

    Raises:
        LabError: naming the setting and a value that would do.
    """
    if not isinstance(value, Real) or isinstance(value, bool) or not abs(float(value)) < float("inf"):
        raise LabError(f"{name}={value!r} is no number that a net could use; give a finite one, such as {name}=1.0")


def one_of(name: str, value: object, choices: Iterable[str]) -> None:
    """Refuse what is not among a few words.

    >>> one_of("activation", "swish", ("tanh", "relu"))
    Traceback (most recent call last):
    resstream.errors.LabError: activation='swish' is not known; choose from 'tanh', 'relu'

    Raises:
        LabError: naming the setting and the words that would do.
    """
    if not isinstance(value, str) or value not in tuple(choices):
        raise LabError(f"{name}={value!r} is not known; choose from {listed(choices)}")
