"""Comparison: how well one result's estimates of patches agree with the patches that another has really run."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float

from resstream.check import Check
from resstream.errors import ResultError, listed
from resstream.result import Result

_SAME = {
    "direction": "patch the same way round",
    "metric": "measure the same metric",
    "window": "patch as many layers together",
}
_STATISTICS = ("pearson", "spearman", "slope")


def compare(exact: Result, estimated: Result) -> Result:
    """Hold estimates of patches against the patches themselves, cell by cell where both have the cell.

    >>> import resstream as rs
    >>> model = rs.load("smollm2")
    >>> pair = (
    ...     "When Mary and John went to the store, John gave a drink to",
    ...     "When Mary and John went to the store, Mary gave a drink to",
    ... )
    >>> metric = rs.logit_diff(" Mary", " John")
    >>> exact = rs.patch_activations(model, *pair, metric, layers=[22, 24, 26, 28])
    >>> estimated = rs.attribution_patching(model, *pair, metric, layers=[24, 28])
    >>> agreement = rs.compare(exact, estimated)
    >>> agreement.data.exact.shape, bool(agreement.data.pearson > 0.9)
    ((1, 1, 2, 14), True)

    What is compared is the change of the metric from the baseline of the run that was patched, in the metric's units.
    Where one of the two has sizes without a sign (`fix="drop"`), sizes are compared on both sides.

    Args:
        exact: patches that were run, such as `patch_activations` returns.
        estimated: estimates of them, such as `attribution_patching` returns; any two results of patches will do.
    Returns:
        Result over the cells that both have, with the labels of `exact`: `exact`, `estimated` and `miss`, their
        difference; and of all these cells together (of each metric, where there are several) `pearson` and `spearman`
        correlation, and `slope`, that of the best line through 0 from exact to estimated changes. A correlation with
        something that does not vary is NaN.
    Raises:
        ResultError: results that are not of patches, or of another model, direction, metric or window, or of other
            axes or prompts; or that have no cell in common.
    """
    _require_same(exact, estimated)
    sized = any("drop" in each.settings.get("fix", ()) for each in (exact, estimated))
    first, second = (abs(change) if sized else change for change in map(_change, (exact, estimated)))
    first, second = _shared(exact, first, second)
    both = first.notnull() & second.notnull()
    if not bool(both.any()):
        raise ResultError(
            f"{exact.measure} and {estimated.measure} have no cell in common that both have a number for; "
            "patch the same positions and heads in both"
        )
    data = xr.Dataset({"exact": first.where(both), "estimated": second.where(both)})
    data["miss"] = data.estimated - data.exact
    data = data.assign(_statistics(data))
    kept = ("direction", "metric", "units")
    settings: dict[str, Any] = {name: exact.settings[name] for name in kept if name in exact.settings}
    settings |= {"exact": _name(exact), "estimated": _name(estimated), "sizes": sized}
    return Result("compare", exact.model, data, _check(exact, estimated), _headline(data, settings), settings)


def _require_same(exact: Result, estimated: Result) -> None:
    for each in (exact, estimated):
        if missing := {"metric", "clean", "corrupted"} - {*each.data.data_vars} or {"direction"} - {*each.settings}:
            raise ResultError(
                f"{each.measure} has no {listed(sorted(map(str, missing)))}, so it is not a result of patches; "
                "compare what patch_activations and attribution_patching return"
            )
    if exact.model != estimated.model:
        raise ResultError(
            f"{exact.measure} is of {exact.model}, and {estimated.measure} of {estimated.model}; "
            "measure both on the same model"
        )
    for name, remedy in _SAME.items():
        ours, theirs = (each.settings.get(name, 1) for each in (exact, estimated))
        if ours != theirs:
            raise ResultError(
                f"{exact.measure} has {name} {ours!r}, and {estimated.measure} has {name} {theirs!r}; {remedy} in both"
            )


def _change(result: Result) -> xr.DataArray:
    """How far each cell moves the metric from the baseline of the run that was patched."""
    start = "corrupted" if result.settings["direction"] == "denoise" else "clean"
    return result.data.metric - result.data[start]


def _shared(exact: Result, first: xr.DataArray, second: xr.DataArray) -> tuple[xr.DataArray, xr.DataArray]:
    """The part of two grids whose labels both have."""
    if {*first.dims} != {*second.dims}:
        raise ResultError(
            f"the axes are {listed(first.dims)} in one and {listed(second.dims)} in the other; "
            "patch the same kinds of site, and each or all of the positions and heads in both"
        )
    for dim in first.dims:
        if not np.isin(first[dim].values, second[dim].values).any():
            raise ResultError(
                f"the two have no {dim} in common: {listed(first[dim].values.tolist())} "
                f"and {listed(second[dim].values.tolist())}; patch some of the same in both"
            )
    one, other = xr.align(first, second.transpose(*first.dims), join="inner", exclude=())
    for name in ("token", "corrupted_token"):
        if name in one.coords and name in other.coords and not np.array_equal(one[name].values, other[name].values):
            raise ResultError(f"the prompts are not the same: their {name}s differ; compare patches of the same pairs")
    return one, other.assign_coords(one.coords)


def _statistics(data: xr.Dataset) -> dict[str, xr.DataArray]:
    """Correlations and slope over all cells, of each metric where there are several."""
    apart = ["metric_name"] if "metric_name" in data.dims else []
    groups = data.stack(cell=[dim for dim in data.exact.dims if dim not in apart], create_index=False)
    rows = zip(
        *(
            groups[name].transpose(*apart, "cell").values.reshape(-1, groups.sizes["cell"])
            for name in ("exact", "estimated")
        ),
        strict=True,
    )
    found = np.array(
        [_agreement(*(values[~np.isnan(exact)] for values in (exact, estimated))) for exact, estimated in rows]
    )
    return {
        name: xr.DataArray(found[:, column] if apart else found[0, column], dims=apart)
        for column, name in enumerate(_STATISTICS)
    }


def _agreement(exact: Float[np.ndarray, " cell"], estimated: Float[np.ndarray, " cell"]) -> tuple[float, float, float]:
    """Pearson and Spearman correlation, and the slope of the best line through 0."""
    size = float(exact @ exact)
    slope = float(exact @ estimated) / size if size else float("nan")
    return _correlation(exact, estimated), _correlation(_ranks(exact), _ranks(estimated)), slope


def _correlation(one: Float[np.ndarray, " cell"], other: Float[np.ndarray, " cell"]) -> float:
    one, other = one - one.mean(), other - other.mean()
    size = float(np.sqrt((one @ one) * (other @ other)))
    return float(one @ other) / size if size else float("nan")


def _ranks(values: Float[np.ndarray, " cell"]) -> Float[np.ndarray, " cell"]:
    """The place of each value in their order; equal values share the mean of their places."""
    _, which, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (last - (count - 1) / 2)[which]


def _check(exact: Result, estimated: Result) -> Check:
    """The worst of both results' own checks, and of how far their baselines are apart."""
    checks = [exact.check, estimated.check]
    tolerance = max(check.tolerance for check in checks)
    for name in ("clean", "corrupted"):
        one, other = xr.align(exact.data[name], estimated.data[name], join="inner")
        scale = max(float(np.abs(one).max()), 1e-30)
        checks.append(Check("both have the same baselines", float(np.abs(one - other).max()) / scale, tolerance, name))
    return max(checks, key=lambda check: (not check.passed, check.error))


def _name(result: Result) -> str:
    """What a result's values are called, with what sets them apart from others of the same measure."""
    steps, fixes = int(result.settings.get("steps", 1)), result.settings.get("fix", [])
    details = [f"{steps} steps"] * (steps > 1) + [f"fix {' and '.join(fixes)}"] * bool(fixes)
    return f"{result.measure} ({', '.join(details)})" if details else result.measure


def _headline(data: xr.Dataset, settings: dict[str, Any]) -> str:
    """How far they agree, and where they agree least."""
    miss = np.abs(data.miss)
    worst = data.isel(miss.argmax(...))
    one = data.isel(metric_name=0) if "metric_name" in data.dims else data
    numbers = ", ".join(f"{name} {float(one[name]):.3f}" for name in _STATISTICS)
    where = ", ".join(f"{dim} {worst[dim].values!s}" for dim in data.exact.dims if data.sizes[dim] > 1)
    count = int(data.exact.notnull().sum())
    return (
        f"{numbers} over {count} cells; largest miss {float(worst.miss):+.2g}"
        f"{f' at {where}' if where else ''}: {float(worst.estimated):.2g} for {float(worst.exact):.2g}"
    )
