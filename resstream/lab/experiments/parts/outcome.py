"""What an experiment returns: a Result with its views, its claims, and intervals over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import xarray as xr
from jaxtyping import Float

from resstream.check import Check
from resstream.errors import LabError
from resstream.lab.experiments.parts.claims import Claim, plain
from resstream.measure.intervals import student
from resstream.result import Result

Scale: TypeAlias = Literal["plain", "log", "share"]


@dataclass(frozen=True)
class View:
    """How one variable of an experiment is drawn.

    Attributes:
        y: the variable; its mean over seeds is a line, with the interval around it, and `reference` what it is held
            against, drawn as crosses, where the dataset has `<y>_reference`.
        x: the dimension along the picture.
        series: the dimension whose entries are lines of their own; "" for one line.
        x_label, y_label: what the axes say.
        log: the axes that are logarithmic: "", "x", "y" or "xy".
        share: whether `y` is a share of 1, such as an accuracy, whose interval ends at 0 and 1.
    """

    y: str
    x: str
    series: str = ""
    x_label: str = ""
    y_label: str = ""
    log: str = ""
    share: bool = False


def outcome(
    name: str,
    net: str,
    data: xr.Dataset,
    *,
    views: Sequence[View],
    claims: Sequence[Claim],
    check: Check,
    headline: str,
    settings: Mapping[str, Any] | None = None,
) -> Result:
    """Put a Result together: means and intervals over seeds are added for the variables that views show.

    Args:
        name: of the experiment, as in `resstream lab NAME`.
        net: what was built, in a few words.
        data: variables over a "seed" dimension, and those without one, such as references.
        views: how to draw it; the first one is the main one.
        claims: what it says about claims.
        check: the identity that was measured along.
        headline: what was found.
        settings: the arguments that matter for reading it.
    """
    for view in views:
        if "seed" in data[view.y].dims:
            scale: Scale = "log" if "y" in view.log else "share" if view.share else "plain"
            data = data.assign(over_seeds(data[view.y], scale))
    described = {"claims": plain(claims), "views": [vars(view) for view in views], **(settings or {})}
    return Result(f"lab.{name}", net, data, check, headline, described)


def over_seeds(values: xr.DataArray, scale: Scale = "plain") -> dict[str, xr.DataArray]:
    """The mean over seeds and its 95% interval, by Student's t.

    >>> found = over_seeds(xr.DataArray([1.0, 2.0, 3.0], dims="seed", name="loss"))
    >>> [round(float(found[name]), 2) for name in ("loss_mean", "loss_low", "loss_high")]
    [2.0, -0.48, 4.48]

    With one seed the ends are NaN, since one says nothing about the others.

    Args:
        values: over "seed" and whatever else.
        scale: "log" for positive values, whose mean is the geometric one; "share" for those between 0 and 1, where the
            interval ends too.
    """
    scaled: xr.DataArray = xr.apply_ufunc(np.log, values) if scale == "log" else values
    count = values.sizes["seed"]
    mean = scaled.mean("seed")
    reach = scaled.std("seed", ddof=1) / count**0.5 * student(count - 1) if count > 1 else mean * np.nan
    ends = {"mean": mean, "low": mean - reach, "high": mean + reach}
    if scale == "log":
        ends = {end: xr.apply_ufunc(np.exp, value) for end, value in ends.items()}
    if scale == "share":
        ends = {end: value.clip(0, 1) for end, value in ends.items()}
    return {f"{values.name}_{end}": value for end, value in ends.items()}


def spelled(values: Float[np.ndarray, " seed"], digits: int = 3, scale: Scale = "plain") -> str:
    """A mean over seeds with its interval, as a claim spells it.

    >>> spelled(np.array([1.0, 2.0, 3.0]))
    '2 (-0.484 to 4.48)'
    """
    found = over_seeds(xr.DataArray(values, dims="seed", name="value"), scale)
    mean, low, high = (float(found[f"value_{end}"]) for end in ("mean", "low", "high"))
    return f"{mean:.{digits}g}" if np.isnan(low) else f"{mean:.{digits}g} ({low:.{digits}g} to {high:.{digits}g})"


def require_seeds(seeds: int, least: int = 1) -> range:
    """The seeds of an experiment.

    Raises:
        LabError: fewer than it needs.
    """
    if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < least:
        raise LabError(f"seeds={seeds!r} draws too few nets; give a whole number from {least} on, such as seeds=5")
    return range(seeds)
