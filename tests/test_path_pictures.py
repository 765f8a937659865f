"""The picture of path patching shows the cells that the result has, in the places that its ticks name."""

from __future__ import annotations

import io

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

from resstream.check import Check
from resstream.errors import ResultError
from resstream.plots import draw, save_picture
from resstream.result import Result

HEADS = [f"{layer}.head.{head}" for layer in (0, 2) for head in range(3)]
RECEIVERS = ["1.q.0", "2.mlp", "logits"]


def paths(senders=("embed", "0.attn", "0.mlp"), receivers=RECEIVERS, positions=0, prompts=2, defined=True, **options):
    """A grid of random effects; a sender has no path to the first receiver if it is the last."""
    dims = ("prompt", "sender", "receiver", *(("position",) if positions else ()))
    shape = (prompts, len(senders), len(receivers), *((positions,) if positions else ()))
    effect = np.random.default_rng(0).normal(size=shape)
    effect[:, -1, 0] = np.nan
    data = xr.Dataset(
        {
            "metric": (dims, effect + 1),
            "effect": (dims, effect if defined else np.full(shape, np.nan)),
            "mean_effect": (dims[1:], effect.mean(0) / 2 if defined else np.full(shape[1:], np.nan)),
            "clean": ("prompt", np.full(prompts, 6.0)),
            "corrupted": ("prompt", np.full(prompts, -5.0)),
        },
        coords={"prompt": range(prompts), "sender": list(senders), "receiver": list(receivers)},
    )
    if positions:
        texts = np.array([[f" w{place}" for place in range(positions)]] * prompts, dtype=object)
        other = texts.copy()
        other[:, 1] = " $x"
        other[-1, 2] = " only here"
        data = data.assign_coords(
            position=range(positions),
            token=(("prompt", "position"), texts),
            corrupted_token=(("prompt", "position"), other),
            length=("prompt", np.full(prompts, positions)),
        )
    settings = {"direction": "noise", "metric": "logit difference", "units": "logits", "frozen": "all"}
    measure = options.get("measure", "path_patching")
    return Result(measure, "toy", data, Check("one = other", 0.0, 1e-5), "found", settings)


def drawn(result, **options):
    """The Axes, the image's numbers, and the labels of its columns and rows."""
    ax = draw(result, Figure(figsize=(12, 12), layout="constrained").add_subplot(), **options)
    ax.figure.savefig(io.BytesIO())
    labels = [[tick.get_text() for tick in ticks] for ticks in (ax.get_xticklabels(), ax.get_yticklabels())]
    return ax, ax.images[0].get_array().filled(np.nan), *labels


@pytest.mark.parametrize("measure", ["path_patching", "direct_effects"])
@pytest.mark.parametrize("prompt", [None, 1])
def test_senders_over_receivers(prompt, measure):
    result = paths(measure=measure)
    ax, values, columns, rows = drawn(result, prompt=prompt)
    effect = result.data.mean_effect if prompt is None else result.data.effect[prompt]
    assert np.array_equal(values, effect.values, equal_nan=True)
    assert (columns, rows) == (RECEIVERS, ["embed", "0.attn", "0.mlp"])
    assert "toy" in ax.get_title(loc="left")
    assert ax.images[0].norm.vmax == -ax.images[0].norm.vmin
    assert "share of the gap removed (noise)" in {each.get_ylabel() for each in ax.figure.axes}


def test_heads_alone_are_layers_over_heads():
    result = paths(HEADS, ["logits"])
    _, values, columns, rows = drawn(result)
    assert np.array_equal(values, result.data.mean_effect.values.reshape(2, 3), equal_nan=True)
    assert (columns, rows) == (["0", "1", "2"], ["0", "2"])
    wide = paths(HEADS)
    ax, values, _, _ = drawn(wide, receiver="2.mlp")
    assert np.array_equal(values, wide.data.mean_effect.values[:, 1].reshape(2, 3))
    assert "to 2.mlp" in ax.get_title(loc="left")


def test_positions_are_columns_of_one_receiver():
    result = paths(positions=4)
    _, values, columns, _ = drawn(result, receiver="2.mlp")
    assert np.array_equal(values, result.data.mean_effect.sel(receiver="2.mlp").values)
    assert columns == ["·w0", "·w1→·$x", "position 2", "·w3"]
    first, *_ = drawn(result)
    assert "to 1.q.0" in first.get_title(loc="left")


def test_values_that_are_large_are_written():
    result = paths()
    ax, values, *_ = drawn(result)
    written = {text.get_text() for text in ax.texts}
    assert f"{values.flat[np.nanargmax(np.abs(values))]:.2f}".replace("0.", ".").replace("-", "−") in written
    assert not draw(result, Figure().add_subplot(), show="none").texts


def test_without_any_effect_the_metric_is_drawn():
    result = paths(defined=False)
    ax, values, *_ = drawn(result)
    assert np.array_equal(values, result.data.metric.mean("prompt").values, equal_nan=True)
    assert any("no effect, since both runs agree" in each.get_ylabel() for each in ax.figure.axes)


def test_a_file_and_a_large_matrix(tmp_path):
    writes = ["embed", *(f"{layer}.{kind}" for layer in range(30) for kind in ("attn", "mlp"))]
    save_picture(paths(writes, [*writes[1:], "logits"], prompts=1), tmp_path / "matrix.png")
    assert (tmp_path / "matrix.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"receiver": "5.q.0"}, "receiver='5.q.0' is not in the picture"),
        ({"show": "all"}, "show='all' is not in the picture"),
        ({"site": "attn"}, 'has no option "site"'),
        ({"prompt": 2}, "no prompt 2"),
    ],
)
def test_a_wrong_choice(options, message):
    with pytest.raises(ResultError, match=message):
        draw(paths(), Figure().add_subplot(), **options)
