"""A result survives its file, its table and its page: values, labels, check and settings."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

import resstream as rs
from resstream.check import Check
from resstream.errors import ResultError
from resstream.result import FORMAT, Result, open_result

TOKENS = [[" a", " a", "\n", "$東<b>"], [" b", "", "", ""]]


def some_result(**changes):
    """A result with every kind of value that a measure makes."""
    dims = ("prompt", "position")
    data = xr.Dataset(
        {
            "effect": (dims, np.array([[1.5, -2.0, np.nan, np.inf], [0.1, np.nan, np.nan, np.nan]])),
            "rank": (dims, np.arange(8).reshape(2, 4)),
            "settled": ("prompt", np.array([True, False])),
            "base": ("prompt", np.array([0.1, 0.2])),
        },
        coords={
            "prompt": [0, 1],
            "position": np.arange(4),
            "token": (dims, np.array(TOKENS, dtype=object)),
            "length": ("prompt", np.array([4, 1])),
            "text": ("prompt", [" a a\n$東<b>", " b"]),
        },
    )
    settings = {"layers": [0, [1, 2]], "how": "skip", "metric": "' 東' <i>", "none": None, "share": 0.5, "on": True}
    found = Result("ablate_layers", "toy", data, Check("same", 1e-7, 1e-5, "0.attn"), "one < two & three", settings)
    return replace(found, **changes)


def test_everything_survives_the_file(tmp_path):
    result = some_result()
    again = open_result(result.save(tmp_path / "result.nc"))
    assert again.data.identical(result.data)
    assert (again.measure, again.model, again.headline) == (result.measure, result.model, result.headline)
    assert again.settings == result.settings
    assert again.check == result.check
    assert repr(again) == repr(result)
    assert list(tmp_path.iterdir()) == [tmp_path / "result.nc"]


def test_a_changed_value_would_be_noticed(tmp_path):
    result = some_result()
    again = open_result(result.save(tmp_path / "result.nc"))
    again.data["effect"][0, 0] += 1e-15
    assert not again.data.identical(result.data)


def test_a_file_can_be_saved_and_opened_again_and_again(tmp_path):
    path = some_result().save(tmp_path / "result.nc")
    for _ in range(2):
        path = open_result(path).save(path)
    assert open_result(path).data.identical(some_result().data)


@pytest.mark.parametrize("place", ["data", "coordinate"])
@pytest.mark.parametrize("token", ["\x00", "a\x00", "\\x00\x00 東\n", " \\u6771\x00"])
def test_tokens_with_the_character_zero_survive_the_file(place, token, tmp_path):
    result = some_result()
    strings = (("prompt", "position"), np.array([[token, "\\n", " b", ""]] * 2, dtype=object), {"note": "kept"})
    changed = result.data.assign(top=strings) if place == "data" else result.data.assign_coords(token=strings)
    again = open_result(replace(result, data=changed).save(tmp_path / "result.nc"))
    assert again.data.identical(changed)


@pytest.mark.parametrize("error", [np.nan, np.inf, 1.0])
def test_a_failed_check_survives_as_failed(error, tmp_path):
    result = some_result(check=Check("same", float(error), 1e-5, "7.mlp"))
    again = open_result(result.save(tmp_path / "result"))
    assert not again.check.passed
    assert repr(again.check) == repr(result.check)
    assert "FAILED" in repr(again)


def test_other_readers_find_the_data(tmp_path):
    path = some_result().save(tmp_path / "result.nc")
    with xr.open_dataset(path, engine="h5netcdf") as opened:
        assert opened["effect"].sel(position=1).values[0] == -2.0
        assert json.loads(opened.attrs["resstream"])["headline"] == "one < two & three"


def test_the_suffix_is_added_and_no_other_is_taken(tmp_path):
    assert some_result().save(tmp_path / "result") == tmp_path / "result.nc"
    with pytest.raises(ResultError, match=r"result\.csv.*to_dataframe"):
        some_result().save(tmp_path / "result.csv")


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(ResultError, match="cannot be written"):
        some_result().save(tmp_path / "nowhere" / "result.nc")


def test_an_error_while_saving_keeps_the_older_file(tmp_path):
    path = some_result().save(tmp_path / "result.nc")
    before = path.read_bytes()
    broken = some_result().data.assign(bad=("prompt", np.array([object(), object()])))
    with pytest.raises(Exception, match="object"):
        some_result(data=broken).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


# Opening


def test_a_missing_file_names_its_neighbours(tmp_path):
    with pytest.raises(ResultError, match=r"no result at.*holds no \.nc file"):
        rs.open_result(tmp_path / "lens.nc")
    some_result().save(tmp_path / "patch.nc")
    with pytest.raises(ResultError, match=r"no result at.*patch\.nc"):
        rs.open_result(tmp_path / "lens.nc")


def test_a_folder_that_is_missing_too_is_no_crash(tmp_path):
    with pytest.raises(ResultError, match="no result at"):
        rs.open_result(tmp_path / "nowhere" / "lens.nc")


def foreign_text(path):
    path.write_text("not a netCDF file")


def foreign_dataset(path):
    xr.Dataset({"a": ("x", [1.0])}).to_netcdf(path, engine="h5netcdf")


def damaged(path):
    attrs = {"resstream_format": FORMAT, "resstream": json.dumps({"measure": "lens"})}
    xr.Dataset({"a": ("x", [1.0])}).assign_attrs(attrs).to_netcdf(path, engine="h5netcdf")


@pytest.mark.parametrize("write", [foreign_text, foreign_dataset, damaged])
def test_a_foreign_file_is_refused(write, tmp_path):
    write(tmp_path / "other.nc")
    with pytest.raises(ResultError, match=r'other\.nc" is not a result.*result\.save'):
        rs.open_result(tmp_path / "other.nc")


def test_a_newer_file_asks_for_an_update_even_if_nothing_else_can_be_read(tmp_path):
    attrs = {"resstream_format": FORMAT + 1, "resstream": "in a form not yet known"}
    xr.Dataset({"a": ("x", [1.0])}).assign_attrs(attrs).to_netcdf(tmp_path / "new.nc", engine="h5netcdf")
    with pytest.raises(ResultError, match=r"newer resstream.*pip install -U resstream"):
        rs.open_result(tmp_path / "new.nc")


# Text, page and table


def test_the_text_is_one_line_with_headline_and_check():
    assert repr(some_result()) == "ablate_layers: toy, one < two & three   check: same: 1e-07 (ok)"


def test_the_page_is_escaped():
    page = some_result(measure="<script>", model="a&b", headline="<img src=x>")._repr_html_()
    assert "&lt;script&gt;</b>: a&amp;b, &lt;img src=x&gt;" in page
    assert "<script" not in page
    assert "<img" not in page
    assert "$東<b>" not in page


def test_a_failed_check_is_red_on_the_page():
    assert "color:#b00020" in some_result(check=Check("same", 1.0, 1e-5))._repr_html_()
    assert "color:#b00020" not in some_result()._repr_html_()


def test_the_table_has_a_row_for_each_cell_also_where_tokens_repeat():
    frame = some_result().to_dataframe()
    assert len(frame) == 5
    first = frame[frame["prompt"] == 0]
    assert first["token"].tolist() == TOKENS[0]
    assert first["position"].tolist() == [0, 1, 2, 3]
    assert first["effect"].tolist()[:2] == [1.5, -2.0]
    assert frame["base"].tolist() == [0.1] * 4 + [0.2]


def test_a_table_keyed_by_token_would_be_noticed():
    frame = some_result().to_dataframe().drop_duplicates(["prompt", "token"])
    assert frame[frame["prompt"] == 0]["token"].tolist() != TOKENS[0]


def test_the_table_ends_where_a_prompt_does_and_keeps_numbers_that_are_missing():
    frame = some_result().to_dataframe()
    assert frame[frame["prompt"] == 1]["token"].tolist() == [" b"]
    assert frame["effect"].isna().sum() == 1


def test_a_table_survives_csv(tmp_path):
    import pandas as pd

    frame = some_result().to_dataframe()
    frame.to_csv(tmp_path / "table.csv", index=False, encoding="utf-8")
    again = pd.read_csv(tmp_path / "table.csv", keep_default_na=False, encoding="utf-8")
    assert again["token"].tolist() == frame["token"].tolist()


def test_real_results_survive_the_file(smollm2, tmp_path):
    result = rs.logit_lens(smollm2, ["The cat and the cat", "東京"], sites=["3.resid_pre", "final"], top_k=2)
    again = rs.open_result(result.save(tmp_path / "lens.nc"))
    assert again.data.identical(result.data)
    assert repr(again) == repr(result)
    cells = int(result.data.length.sum()) * 2
    assert len(again.to_dataframe()) == cells
    assert "top_string" not in again.to_dataframe()
    assert len(again.to_dataframe("top_string")) == cells * 2
    with pytest.raises(ResultError, match=r'logit_lens has no variable "topstring": it has .log_prob.'):
        again.to_dataframe("topstring")
