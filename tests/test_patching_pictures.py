"""Pictures of patched heads, of several sites and metrics, and of ablated heads show what the grids hold."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from resstream.check import Check
from resstream.errors import ResultError
from resstream.plots import draw, save_picture
from resstream.plots.canvas import cell_number
from resstream.result import Result

TOKENS = (" John", " Mary", " gave", " John")
DIMS = ("site", "layer", "head", "position")
LOSS = "log-probability of ' Mary'"


def patching(
    sites=("z",), heads=5, positions="each", prompts=1, metrics=(), measure="patch_activations", part="head", **settings
):
    """Random effects of three layers; of keys and values only the first two heads are there."""
    rng = np.random.default_rng(0)
    columns = {"each": list(range(4)), "all": [None]}.get(positions, list(positions))
    effect = rng.normal(0.1, 0.3, (prompts, len(sites), 3, heads, len(columns)))
    for number, site in enumerate(sites):
        if site in ("k", "v"):
            effect[:, number, :, 2:] = np.nan
    # Not the mean of the effects, which weighs each pair by its gap.
    mean = effect[0] if prompts == 1 else effect.mean(0) * 1.1
    data = xr.Dataset(
        {
            "metric": (("prompt", *DIMS), effect * 11 - 5),
            "effect": (("prompt", *DIMS), effect),
            "clean": ("prompt", np.full(prompts, 6.0)),
            "corrupted": ("prompt", np.full(prompts, -5.0)),
            "mean_effect": (DIMS, mean),
        },
        coords={"prompt": range(prompts), "site": list(sites), "layer": [0, 1, 5], "head": range(heads)},
    )
    if prompts > 1:
        data = data.assign(effect_low=(DIMS, mean - 0.05), effect_high=(DIMS, mean + 0.2))
    if positions == "all":
        data = data.isel(position=0)
    else:
        clean = np.array(
            [[TOKENS[place] if isinstance(place, int) else " to" for place in columns]] * prompts, dtype=object
        )
        corrupted = clean.copy()
        corrupted[:, -1] = " Mary"
        data = data.assign_coords(
            position=columns,
            token=(("prompt", "position"), clean),
            corrupted_token=(("prompt", "position"), corrupted),
            length=("prompt", np.full(prompts, 4)),
        )
    names, units = "logit difference", "logits"
    if metrics:
        scaled = [data.map(lambda each, by=by: each * by) for by in range(1, len(metrics) + 1)]
        data = xr.concat(scaled, xr.DataArray(list(metrics), dims="metric_name", name="metric_name"))
        data = data.transpose("prompt", "metric_name", ...)
        names, units = list(metrics), ["nats"] * len(metrics)
    if part != "head":
        data = data.rename(head=part)
    told = {"direction": "denoise", "metric": names, "units": units, **settings}
    return Result(measure, "toy", data, Check("one = other", 0.0, 1e-5), "found", told)


def ablation(heads, prompts=1):
    """The removal of some heads, by name."""
    effect = np.random.default_rng(1).normal(size=(prompts, len(heads)))
    data = xr.Dataset(
        {"effect": (("prompt", "unit"), effect), "base": ("prompt", np.full(prompts, 6.0))},
        coords={"unit": [f"{layer}.head.{head}" for layer, head in heads]},
    )
    settings = {"unit": "head", "how": "mean", "metric": "logit difference", "units": "logits"}
    return Result("ablate_layers", "toy", data, Check("one = other", 0.0, 1e-5), "found", settings)


@pytest.fixture
def ax():
    return Figure(figsize=(14, 9)).add_subplot()


@pytest.fixture
def whole():
    """Draw onto a whole figure, and give its panels: Axes that have a title of their own."""

    def draws(result, **options):
        figure = draw(result, **options).figure
        figure.savefig(io.BytesIO(), dpi=30)
        return [each for each in figure.axes if each.get_title(loc="left")]

    yield draws
    plt.close("all")


def image(ax):
    """The numbers of a map, the first row at the bottom."""
    (found,) = ax.images
    assert found.origin == "lower"
    return np.ma.filled(found.get_array(), np.nan)


def ticks(ax, axis="x"):
    return [label.get_text() for label in getattr(ax, f"get_{axis}ticklabels")()]


def words(ax):
    return "\n".join(text.get_text() for text in ax.figure.findobj(plt.Text))


def written(ax):
    """What stands in each cell, by (row, column)."""
    return {tuple(round(at) for at in text.get_position()[::-1]): text.get_text() for text in ax.texts}


# Heads


@pytest.mark.parametrize("prompts", [1, 3])
def test_heads_at_all_positions_are_a_map_of_layers_by_heads(prompts, ax):
    result = patching(positions="all", prompts=prompts)
    draw(result, ax)
    expected = result.data.mean_effect.values[0]
    assert np.array_equal(image(ax), expected)
    assert not np.array_equal(image(ax), expected[::-1])
    assert (ticks(ax), ticks(ax, "y")) == (list("01234"), ["0", "1", "5"])
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("head", "layer")
    assert ax.images[0].norm.vmax == -ax.images[0].norm.vmin == abs(expected).max()
    assert "z of each head at all positions" in ax.get_title(loc="left")


def shows_the_strongest(ax, effects):
    """Whether a map has, of each head, the effect of the largest size over positions, with its own sign."""
    expected = np.array([[max(cell, key=abs) for cell in row] for row in effects])
    return np.array_equal(image(ax), expected)


def test_heads_at_each_position_are_shown_where_they_are_strongest(ax):
    result = patching()
    draw(result, ax)
    effects = result.data.mean_effect.values[0]
    assert shows_the_strongest(ax, effects)
    strong = abs(image(ax)) >= 0.15 * abs(effects).max()
    places = {(row, column): effects[row, column] for row, column in np.argwhere(strong).tolist()}
    seen = [token.replace(" ", "·") for token in TOKENS]
    assert written(ax) == {
        at: f"{cell_number(max(cell, key=abs))}@{seen[int(np.argmax(abs(cell)))]}" for at, cell in places.items()
    }


@pytest.mark.parametrize("how", [np.max, np.mean, lambda values, axis: abs(values).max(axis)])
def test_another_summary_over_positions_would_be_noticed(how, ax):
    result = patching()
    wrong = how(result.data.mean_effect.values, axis=-1)[..., None].repeat(4, -1)
    draw(replace(result, data=result.data.assign(mean_effect=(DIMS, wrong))), ax)
    assert not shows_the_strongest(ax, result.data.mean_effect.values[0])


def test_keys_and_values_that_are_not_there_are_hatched(whole):
    result = patching(sites=("q", "k"), positions="all")
    queries, keys, _ = whole(result)
    hatched = [patch for patch in keys.patches if isinstance(patch, Rectangle) and patch.get_hatch()]
    assert [patch.get_x() + 0.5 for patch in hatched] == [2, 3, 4]
    assert not [patch for patch in queries.patches if patch.get_hatch()]
    assert (queries.get_xlabel(), keys.get_xlabel()) == ("head", "key/value head (hatched: there is none)")
    assert np.array_equal(image(keys), result.data.mean_effect.sel(site="k").values, equal_nan=True)


def test_each_site_has_a_panel_in_the_same_colours_and_the_largest_cells_come_last(whole):
    result = patching(sites=("q", "z"))
    *maps, cells = whole(result)
    assert [re.split(r"[ ,]", each.get_title(loc="left"))[0] for each in maps] == ["q", "z"]
    for site, each in zip(("q", "z"), maps, strict=True):
        assert shows_the_strongest(each, result.data.mean_effect.sel(site=site).values)
        assert each.images[0].norm.vmax == abs(result.data.mean_effect).max()
    assert cells.get_title(loc="left") == "largest effects of q, z"
    bars = [each for each in cells.figure.axes if "share of the gap" in each.get_ylabel()]
    assert len(bars) == 1


def test_heads_that_are_patched_whole_are_called_by_one_name(whole):
    grid, cells = whole(patching(sites=("head",), positions="all"))
    assert grid.get_title(loc="left") == "each head at all positions"
    assert cells.get_title(loc="left") == "largest effects of heads at all positions"


# The largest cells


def points(ax):
    """The names of the cells that are listed, and their effects."""
    found = {
        round(y): x
        for line in ax.lines
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
        if line.get_marker() != "None"
    }
    return list(zip(ticks(ax, "y"), [found[row] for row in sorted(found)], strict=True))


@pytest.mark.parametrize("prompts", [1, 3])
def test_the_largest_cells_are_listed_with_their_intervals(prompts, ax):
    result = patching(sites=("q", "k"), prompts=prompts)
    draw(result, ax, panel="largest")
    frame = result.data.mean_effect.to_dataframe().reset_index().dropna(subset="mean_effect")
    frame = frame.reindex(frame.mean_effect.abs().sort_values(ascending=False).index)[:12]
    spelled = ["·John", "·Mary", "·gave", "·John→·Mary"]
    expected = [
        (f"{row.layer}.{row.site}.{row.head} at {spelled[row.position]}", row.mean_effect) for row in frame.itertuples()
    ]
    assert points(ax) == expected
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # the first one on top
    segments = [line for each in ax.collections if isinstance(each, LineCollection) for line in each.get_segments()]
    assert len(segments) == (12 if prompts > 1 else 0)
    for (low, row), (high, _) in segments:
        assert (low, high) == pytest.approx((expected[round(row)][1] - 0.05, expected[round(row)][1] + 0.2))
    assert ("95% intervals" in ax.get_title(loc="left")) == (prompts > 1)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["q", "k"]


def test_one_pair_has_no_interval_among_several(ax):
    draw(patching(prompts=3), ax, panel="largest", prompt=1)
    assert not [each for each in ax.collections if isinstance(each, LineCollection)]
    assert max(abs(value) for _, value in points(ax)) == abs(patching(prompts=3).data.effect[1]).max()


def test_neurons_are_listed_unless_their_map_is_asked_for(whole, ax):
    result = patching(heads=300, positions="all", part="neuron", sites=("neuron",))
    draw(result, ax)
    assert len(points(ax)) == 12
    assert points(ax)[0][0].split(".")[1] == "neuron"
    drawn = draw(result, Figure().add_subplot(), panel="grid")
    assert np.array_equal(image(drawn), result.data.mean_effect.values[0])


# Positions, metrics, and what the titles say


def test_one_position_is_no_axis(ax):
    result = patching(positions=("last",))
    draw(result, ax)
    assert np.array_equal(image(ax), result.data.mean_effect.values[0, ..., 0])
    assert "z of each head at last (·to→·Mary)" in ax.get_title(loc="left")


def test_positions_that_have_names_keep_them_where_tokens_differ(ax):
    result = patching(positions=("last", " went"), prompts=2).data.isel(head=0, drop=True)
    result["token"][1, 0] = " from"
    draw(replace(patching(), data=result), ax)
    assert ticks(ax) == ["last", "·went (·to→·Mary)"]


def test_a_grid_without_heads_keeps_two_equal_tokens_apart(ax):
    result = patching().data.isel(head=0, drop=True)
    draw(replace(patching(), data=result), ax)
    assert image(ax).shape == (3, 4)
    assert ticks(ax) == ["·John", "·Mary", "·gave", "·John→·Mary"]


def test_each_metric_has_a_panel_and_can_be_chosen(whole, ax):
    result = patching(metrics=("logit difference", LOSS), positions="all")
    panels = [each for each in whole(result) if each.images]
    for number, (panel, name) in enumerate(zip(panels, ("logit difference", LOSS), strict=True)):
        assert np.array_equal(image(panel), result.data.mean_effect.values[number, 0])
        assert panel.get_title(loc="left").splitlines()[1].startswith(f"{name}: clean {6 * (number + 1)}.00")
    draw(result, ax, metric=LOSS)
    assert np.array_equal(image(ax), result.data.mean_effect.values[1, 0])
    with pytest.raises(ResultError, match=r"metric='size'.*'logit difference'"):
        draw(result, metric="size")


def test_the_window_and_the_way_to_estimate_are_in_the_title(ax):
    assert "of toy, windows of 5 layers" in draw(patching(window=5), ax).get_title(loc="left")
    assert "windows" not in draw(patching(window=1), Figure().add_subplot()).get_title(loc="left")
    estimated = patching(measure="attribution_patching", steps=4, fix=["qk"])
    found = draw(estimated, Figure().add_subplot())
    assert found.get_title(loc="left").startswith("Attribution patching (4 steps, fix qk) of toy")
    assert found.figure.axes[1].get_ylabel().startswith("estimated share of the gap restored (denoise):")


def test_sizes_without_a_sign_are_not_drawn_around_zero(ax):
    result = patching(measure="attribution_patching", fix=["drop"], positions="all")
    draw(replace(result, data=abs(result.data)), ax)
    assert ax.images[0].norm.vmin == abs(result.data.mean_effect).min()
    assert ax.figure.axes[1].get_ylabel().endswith("it has no sign")


@pytest.mark.parametrize(
    ("value", "text"), [(0.314, ".31"), (-0.05, "−.05"), (10.5, "10.50"), (-20.25, "−20.25"), (np.nan, "")]
)
def test_a_number_in_a_cell_loses_its_leading_zero_only(value, text):
    assert cell_number(value) == text


@pytest.mark.parametrize("panel", [None, "grid", "largest"])
@pytest.mark.parametrize("measure", ["patch_activations", "attribution_patching"])
def test_a_file_needs_no_pyplot(panel, measure, tmp_path):
    save_picture(patching(sites=("q", "k"), measure=measure), tmp_path / "a.png", dpi=30, panel=panel)
    assert not plt.get_fignums()


def test_a_failed_check_is_said_above_all_panels(whole):
    panels = whole(replace(patching(sites=("q", "k")), check=Check("one = other", 1.0, 1e-5)))
    assert panels[0].figure.get_suptitle().startswith("check FAILED")
    assert words(panels[0]).count("do not rely on this") == 1


# Ablated heads

ALL = [(layer, head) for layer in (0, 1, 4) for head in range(9)]


@pytest.mark.parametrize("prompts", [1, 2])
def test_many_ablated_heads_are_a_map(prompts, ax):
    result = ablation(ALL, prompts)
    draw(result, ax)
    expected = result.data.effect.mean("prompt").values.reshape(3, 9)
    assert np.array_equal(image(ax), expected)
    assert not np.array_equal(image(ax), expected.reshape(9, 3).T)
    assert (ticks(ax), ticks(ax, "y")) == ([str(head) for head in range(9)], ["0", "1", "4"])
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("head that was replaced by its mean", "layer")
    assert ax.figure.axes[1].get_ylabel() == "change of logit difference\n(logits)"


def test_heads_that_were_not_ablated_are_left_grey(ax):
    result = ablation(ALL[:10] + ALL[11:])
    draw(result, ax)
    assert np.argwhere(np.isnan(image(ax))).tolist() == [[1, 1]]


def test_a_few_ablated_heads_are_bars_with_their_names(ax):
    draw(ablation([(0, 3), (4, 1)]), ax)
    assert ticks(ax) == ["0.head.3", "4.head.1"]
    assert not ax.images
    assert ax.get_xlabel() == "head that was replaced by its mean"
