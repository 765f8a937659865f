"""What every measure returns: labelled arrays, a certificate, and a headline; it saves, tabulates and draws itself."""

from __future__ import annotations

import html
import json
from collections.abc import Hashable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from resstream.check import Check
from resstream.errors import ResultError, listed

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

FORMAT = 1


@dataclass(frozen=True, repr=False)
class Result:
    """The outcome of one measure.

    >>> import resstream as rs
    >>> lens = rs.logit_lens(rs.load("smollm2"), "The Eiffel Tower is in the city of", targets=" Paris")
    >>> lens.data.log_prob.dims, lens.check.passed
    (('prompt', 'site', 'position'), True)

    >>> import resstream as rs
    >>> result = rs.logit_lens(rs.load("smollm2"), "The Eiffel Tower is in the city of", targets=" Paris")
    >>> result.headline
    "' Paris' at the last token is first from 28.resid_post on, and ends at 0.656"
    >>> result.check.passed, dict(result.data.log_prob.sizes)
    (True, {'prompt': 1, 'site': 30, 'position': 9})

    Attributes:
        measure: name of the function that made it, such as "logit_lens".
        model: name of the model that it was measured on.
        data: labelled arrays; dimensions and variables have the names that the docs list.
        check: the identity that was measured along with it.
        headline: what was found, in one line.
        settings: the arguments that matter for reading it, as plain values.
    """

    measure: str
    model: str
    data: xr.Dataset
    check: Check
    headline: str
    settings: dict[str, Any] = field(default_factory=dict)

    def plot(self, ax: Axes | None = None, **options: Any) -> Axes:
        """Draw the result.

        Args:
            ax: where to draw; a new figure if None.
            **options: choices of this measure's picture, such as `prompt=1`; see `resstream.plots`.
        Returns:
            The Axes that were drawn on; `.figure` is theirs.
        """
        # Imported here, and only here, so that measuring never costs matplotlib.
        from resstream.plots import draw

        return draw(self, ax, **options)

    def to_dataframe(self, of: str | None = None) -> pd.DataFrame:
        """One row for each cell of a grid, one column for each variable on it, labels as columns.

        Variables over other dimensions stay away: a table that crossed them all could be larger than memory.

        Args:
            of: the variable whose grid it is, such as "interaction"; by default the measure's main one.
        Returns:
            A table without rows beyond a prompt's end.
        Raises:
            ResultError: no such variable.
        """
        of = next(iter(map(str, self.data.data_vars))) if of is None else of
        if of not in self.data.data_vars:
            raise ResultError(f'{self.measure} has no variable "{of}": it has {listed(self.data.data_vars)}')
        grid = set(self.data[of].dims)
        names = [name for name, variable in self.data.data_vars.items() if set(variable.dims) <= grid]
        data = self.data[names]
        frame = data.to_dataframe(dim_order=self.data[of].dims).reset_index()
        # Positions that were chosen by name are there in every prompt.
        if {"position", "length"} <= set(frame.columns) and np.issubdtype(self.data["position"].dtype, np.integer):
            frame = frame[frame["position"] < frame["length"]].reset_index(drop=True)
        return frame

    def save(self, path: str | Path) -> Path:
        """Write everything to one netCDF file, which xarray and other tools can read too.

        Args:
            path: where to; the suffix .nc is added if it has none.
        Returns:
            The path of the file.
        Raises:
            ResultError: another suffix than .nc, or a place that cannot be written.
        """
        target = Path(path)
        target = target if target.suffix else target.with_suffix(".nc")
        if target.suffix != ".nc":
            raise ResultError(
                f'a result is saved as netCDF, and "{target}" is named otherwise; end it in .nc, or write '
                "result.plot().figure.savefig(...) for a picture, result.to_dataframe().to_csv(...) for a table"
            )
        described = {
            "measure": self.measure,
            "model": self.model,
            "headline": self.headline,
            "settings": self.settings,
            "check": asdict(self.check),
        }
        attrs = {"resstream_format": FORMAT, "resstream": json.dumps(described)}
        draft = target.with_name(target.name + ".tmp")
        try:
            _escaped(self.data).assign_attrs(attrs).to_netcdf(draft, engine="h5netcdf")
            draft.replace(target)
        except OSError as error:
            raise ResultError(f'"{target}" cannot be written: {error}; give another place') from error
        finally:
            draft.unlink(missing_ok=True)
        return target

    def __repr__(self) -> str:
        return f"{self.measure}: {self.model}, {self.headline}   check: {self.check}"

    def _repr_html_(self) -> str:
        mark = "" if self.check.passed else ' style="color:#b00020"'
        return (
            f"<p><b>{html.escape(self.measure)}</b>: {html.escape(self.model)}, {html.escape(self.headline)}<br>"
            f"<small{mark}>check: {html.escape(repr(self.check))}</small></p>{self.data._repr_html_()}"
        )


def open_result(path: str | Path) -> Result:
    """Read a result that was saved with `Result.save`.

    >>> import resstream as rs
    >>> result = rs.open_result("lens.nc")  # doctest: +SKIP

    Raises:
        ResultError: no such file, or not a result of this library.
    """
    source = Path(path)
    if not source.is_file():
        near = sorted(entry.name for entry in source.parent.glob("*.nc"))[:8] if source.parent.is_dir() else []
        raise ResultError(f'no result at "{source}": {f"there are {near}" if near else "the folder holds no .nc file"}')
    try:
        with xr.open_dataset(source, engine="h5netcdf") as opened:
            data = opened.load()
        version = int(data.attrs.pop("resstream_format"))
        if version > FORMAT:
            raise ResultError(
                f'"{source}" was written by a newer resstream (format {version}, this one reads up to {FORMAT}); '
                "update with pip install -U resstream"
            )
        described = json.loads(data.attrs.pop("resstream"))
        check = Check(**described.pop("check"))
        return Result(data=_restored(data), check=check, **described)
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise ResultError(
            f'"{source}" is not a result of this library ({type(error).__name__}: {error}); '
            "write one with result.save(path)"
        ) from error


def _escaped(data: xr.Dataset) -> xr.Dataset:
    """Strings as a file can hold them: where one has the character 0, as tokens may, all beside it are escaped."""
    for name, variable in data.variables.items():
        if variable.dtype.kind in "OU" and any("\0" in str(text) for text in variable.values.flat):
            texts = [str(text).encode("unicode_escape").decode("ascii") for text in variable.values.flat]
            data = _with_texts(data, name, texts, {**variable.attrs, _ESCAPED: 1})
    return data


def _restored(data: xr.Dataset) -> xr.Dataset:
    """The strings that `_escaped` was given."""
    for name, variable in data.variables.items():
        if _ESCAPED in variable.attrs:
            texts = [str(text).encode("ascii").decode("unicode_escape") for text in variable.values.flat]
            kept = {key: value for key, value in variable.attrs.items() if key != _ESCAPED}
            data = _with_texts(data, name, texts, kept)
    return data


def _with_texts(data: xr.Dataset, name: Hashable, texts: list[str], attrs: dict[Any, Any]) -> xr.Dataset:
    variable = data.variables[name]
    # Of objects, since an array of fixed width would drop a character 0 at the end.
    values = np.array(texts, dtype=object).reshape(variable.shape)
    assign = data.assign_coords if name in data.coords else data.assign
    return assign({name: (variable.dims, values, attrs)})


_ESCAPED = "resstream_escaped"
