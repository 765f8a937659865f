"""Pictures show what the data say: values, places, units and every column, whatever the tokens are."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from math import comb

import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr
from matplotlib.collections import FillBetweenPolyCollection, LineCollection
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from resstream.check import Check
from resstream.errors import ResultError
from resstream.plots import canvas, draw, save_picture
from resstream.plots.canvas import spell, visible
from resstream.plots.paths import spell_number
from resstream.result import Result

TOKENS = ("When", " Mary", " and", " John", " gave", " to", " John")
# Formulas, controls, other scripts, an emoji, and what LaTeX would choke on.
ODD = (" $x", "$", "\n", " 東京", "\x00", "_^{\\frac", " 🙂")
CHECK = Check("one side = the other", 1e-7, 1e-5)
UNITS = {"metric": "logit difference ' $Mary' - ' 東'", "units": "logits"}


def lens(tokens=TOKENS, prompts=1, target=" Mary"):
    """A lens over the embedding and three layers; the last prompt is one token shorter where there are several."""
    rng = np.random.default_rng(0)
    shape = (prompts, 4, len(tokens))
    values = -rng.gamma(2.0, 2.0, shape)
    rank = rng.integers(2, 5000, shape).astype(float)
    rank[:, -1, 1] = 1
    top = np.broadcast_to(np.array([*tokens], dtype=object), shape)[..., None]
    lengths = np.array([len(tokens)] * (prompts - 1) + [len(tokens) - (prompts > 1)])
    beyond = np.arange(len(tokens))[None, None] >= lengths[:, None, None]
    dims = ("prompt", "site", "position")
    numbers = {"log_prob": values, "rank": rank, "entropy": -values, "kl": -values, "loss": -values}
    data = xr.Dataset(
        {name: (dims, np.where(beyond, np.nan, each)) for name, each in numbers.items()}
        | {
            "top_string": ((*dims, "top"), top),
            "target_string": (("prompt", "position"), np.full((prompts, len(tokens)), target, dtype=object)),
        },
        coords={
            "prompt": range(prompts),
            "site": ["0.resid_pre", "0.resid_post", "1.resid_post", "2.resid_post"],
            "position": range(len(tokens)),
            "token": (("prompt", "position"), np.array([tokens] * prompts, dtype=object)),
            "length": ("prompt", lengths),
        },
    )
    return Result("logit_lens", "toy", data, CHECK, "found", {"top_k": 1})


def patching(tokens=TOKENS, prompts=1, direction="denoise", defined=True, positions=True):
    """A patching grid of two sites and three layers, in which the fourth token differs between the runs."""
    rng = np.random.default_rng(1)
    dims = ("prompt", "site", "layer", "position")
    shape = (prompts, 2, 3, len(tokens))
    effect = rng.normal(0.2, 0.4, shape) if defined else np.full(shape, np.nan)
    # Not the mean of the effects, which weighs each pair by its gap.
    mean = effect[0] if prompts == 1 else effect.mean(0) + 0.1
    ends = {"effect_low": (dims[1:], mean - 0.05), "effect_high": (dims[1:], mean + 0.2)} if prompts > 1 else {}
    corrupted = [" Mary" if place == 3 else token for place, token in enumerate(tokens)]
    data = xr.Dataset(
        {
            "metric": (dims, rng.normal(size=shape)),
            "effect": (dims, effect),
            "clean": ("prompt", np.full(prompts, 6.0)),
            "corrupted": ("prompt", np.full(prompts, -5.0)),
            "mean_effect": (dims[1:], mean),
            **ends,
        },
        coords={
            "prompt": range(prompts),
            "site": ["resid_pre", "attn"],
            "layer": [0, 1, 2],
            "position": range(len(tokens)),
            "token": (("prompt", "position"), np.array([tokens] * prompts, dtype=object)),
            "corrupted_token": (("prompt", "position"), np.array([corrupted] * prompts, dtype=object)),
            "length": ("prompt", np.full(prompts, len(tokens))),
        },
    )
    data = data if positions else data.isel(position=0, drop=True)
    return Result("patch_activations", "toy", data, CHECK, "found", {"direction": direction, **UNITS})


def ablation(tokens=TOKENS, prompts=1, unit="layer", how="skip"):
    """An ablation of eight units."""
    effect = np.random.default_rng(2).normal(size=(prompts, 8))
    names = [str(layer) if unit == "layer" else f"{layer}.{unit}" for layer in range(8)]
    data = xr.Dataset(
        {
            "metric": (("prompt", "unit"), effect + 3),
            "effect": (("prompt", "unit"), effect),
            "base": ("prompt", np.full(prompts, 3.0)),
        },
        coords={"unit": names, "text": ("prompt", ["".join(tokens)] * prompts)},
    )
    return Result("ablate_layers", "toy", data, CHECK, "found", {"unit": unit, "how": how, **UNITS})


def paths(tokens=TOKENS, prompts=1, kappa=3.0, sampled=True, signed=True, branches=False):
    """The spectrum of eight writes, four layers, in which prompt p's values are 1 + p times the first one's."""
    lengths = np.arange(9)
    count = np.array([comb(8, int(length)) for length in lengths], dtype=float)
    single = np.array([0.5**length for length in lengths])
    veit = count * single / (count * single).sum()
    share = veit * (-1.0) ** lengths if sampled else np.linspace(-1, 2, 9) / 4.5

    def each(values, known=True):
        return ("prompt", "path_length"), np.array(
            [(1 + p) * values if known else values * np.nan for p in range(prompts)]
        )

    def alone(value, known=True):
        return "prompt", np.array([(1 + p) * value if known else np.nan for p in range(prompts)])

    rms = 2 * single * np.sqrt(count)
    variables = {
        "count": ("path_length", count),
        "norm": each(count),
        "share": each(share),
        **{f"path_norm{end}": each(single * by, sampled) for end, by in (("", 1), ("_low", 0.5), ("_high", 2))},
        **{f"rms{end}": each(rms * by, signed) for end, by in (("", 1), ("_low", 0.5), ("_high", 2))},
        "veit": each(veit, sampled),
        "kappa": alone(kappa),
        "gradient_norm": alone(2.0),
        "completeness": alone(1e-14),
        "effective_low": alone(1.0, sampled),
        "effective_high": alone(4.0, sampled),
        "effective_share": alone(162 / 256, sampled),
        "kappa_from": (("prompt", "layer"), np.array([kappa ** np.arange(4, 0, -1.0)] * prompts)),
    }
    if branches:
        norm = np.outer([4.0, 2.0, 1.0, 1e-9, 0.0], [1.0, 3.0, 1.0, 1.0, 0.0])
        variables["branch_norm"] = (("prompt", "attn_hops", "mlp_hops"), np.array([norm] * prompts))
    data = xr.Dataset(
        variables,
        coords={"layer": range(4), "path_length": lengths, "text": ("prompt", ["".join(tokens)] * prompts)},
    )
    if prompts > 1:
        for name in ("norm", "share", "veit"):
            mean = data[name].mean("prompt")
            data = data.assign({f"{name}_mean": mean, f"{name}_low": mean - 0.1, f"{name}_high": mean + 0.2})
    settings = {"unit": "write", "start": 0, "samples": 64 * sampled, "coverage": 0.95, "n_paths": "2^8", **UNITS}
    return Result("path_lengths", "toy", data, CHECK, "found", settings)


def logit_paths(tokens=TOKENS, prompts=1):
    """A logit of -2 from terms of either sign, in which lengths above 5 add next to nothing."""
    terms = np.array([0.5, -3.0, 4.0, -2.0, -1.0, 0.0, 1e-9, 0.0, 0.0, 0.0, 0.0, 0.0])
    data = xr.Dataset(
        {
            "term": (("prompt", "path_length"), np.array([terms] * prompts)),
            "constant": ("prompt", np.full(prompts, -0.5)),
            "logit": ("prompt", np.full(prompts, -2.0)),
            "kappa": ("prompt", np.full(prompts, 5.25)),
        },
        coords={"path_length": range(12), "text": ("prompt", ["".join(tokens)] * prompts)},
    )
    settings = {"gauge": "frozen", "meaning": "norm scales held fixed", **UNITS}
    return Result("logit_by_path_length", "toy", data, CHECK, "found", settings)


MEASURES = {
    "logit_lens": lens,
    "patch_activations": patching,
    "ablate_layers": ablation,
    "path_lengths": paths,
    "logit_by_path_length": logit_paths,
}
OPTIONS = {
    "logit_lens": ("prompt", "variable", "show"),
    "patch_activations": ("prompt", "site", "metric", "panel", "show"),
    "ablate_layers": ("prompt",),
    "path_lengths": ("prompt", "panel"),
    "logit_by_path_length": ("prompt",),
}
every_measure = pytest.mark.parametrize("measure", MEASURES)


@pytest.fixture
def ax():
    """Axes of a figure that pyplot never sees."""
    return Figure().add_subplot()


@pytest.fixture(autouse=True)
def _fonts_of_no_machine(monkeypatch):
    """Only the font that matplotlib brings along, whatever this machine has installed."""
    monkeypatch.setattr(canvas, "_FALLBACKS", ())
    canvas._letters.cache_clear()
    yield
    canvas._letters.cache_clear()


@pytest.fixture(autouse=True)
def _no_figure_is_left_open():
    yield
    left = plt.get_fignums()
    plt.close("all")
    assert not left


def render(ax):
    """Draw for real, so that a letter without a font or a broken formula raises."""
    ax.figure.savefig(io.BytesIO(), dpi=40)


def words(ax):
    """All text of a figure, in one string."""
    figure = ax.figure
    render(ax)
    texts = [text.get_text() for each in figure.axes for text in each.findobj(plt.Text)]
    return "\n".join([*texts, *(text.get_text() for text in figure.texts)])


def tick_labels(ax):
    return [label.get_text() for label in ax.get_xticklabels()]


def cells(ax):
    (image,) = ax.images
    return np.ma.filled(image.get_array(), np.nan)


@every_measure
def test_it_draws_on_the_axes_it_is_given(measure, ax):
    assert MEASURES[measure]().plot(ax) is ax
    assert ax.get_xlabel()
    assert ax.get_ylabel()
    assert ax.get_title(loc="left")
    render(ax)


@every_measure
def test_it_makes_a_figure_that_a_notebook_shows(measure):
    found = MEASURES[measure]().plot()
    assert found.figure.number in plt.get_fignums()
    render(found)
    plt.close(found.figure)


@every_measure
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_file_needs_no_pyplot(measure, prompts, tmp_path):
    for suffix, start in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        save_picture(MEASURES[measure](prompts=prompts), tmp_path / f"picture.{suffix}", dpi=40)
        assert (tmp_path / f"picture.{suffix}").read_bytes().startswith(start)
    assert not plt.get_fignums()


@every_measure
def test_the_name_of_the_model_is_in_the_title(measure, ax):
    assert "toy" in draw(MEASURES[measure](), ax).get_title(loc="left")


@every_measure
def test_a_failed_check_is_the_first_thing_said(measure, ax):
    failed = replace(MEASURES[measure](), check=Check("one side = the other", 1.0, 1e-5))
    assert "FAILED" in draw(failed, ax).get_title(loc="left").splitlines()[0]
    assert "FAILED" not in draw(MEASURES[measure](), Figure().add_subplot()).get_title(loc="left")


@every_measure
def test_a_failed_check_is_said_on_a_whole_figure_too(measure):
    found = draw(replace(MEASURES[measure](), check=Check("one side = the other", np.nan, 1e-5)))
    assert "check FAILED" in words(found) + (found.figure.get_suptitle() or "")
    plt.close(found.figure)


@every_measure
def test_any_token_and_any_metric_can_be_drawn(measure):
    result = MEASURES[measure](tokens=ODD)
    found = draw(replace(result, model="a $model_{東", settings={**result.settings, "units": "$^"}))
    render(found)
    plt.close(found.figure)


@every_measure
def test_an_unknown_option_names_those_that_exist(measure, ax):
    with pytest.raises(ResultError, match='no option "colour"') as caught:
        draw(MEASURES[measure](), ax, colour="red")
    assert all(repr(option) in str(caught.value) for option in OPTIONS[measure])


@every_measure
@pytest.mark.parametrize("prompt", [1, -1])
def test_a_prompt_that_is_not_there_is_refused(measure, prompt):
    with pytest.raises(ResultError, match=f"no prompt {prompt!r}.*has prompts 0-0"):
        draw(MEASURES[measure](), prompt=prompt)


@every_measure
def test_a_result_of_another_shape_is_refused(measure):
    result = MEASURES[measure]()
    poorer = replace(result, data=result.data.drop_vars({"log_prob", "effect", "share", "term"} & set(result.data)))
    with pytest.raises(ResultError, match="needs the variable"):
        draw(poorer)


def test_a_measure_without_a_picture_is_refused():
    with pytest.raises(ResultError, match=r"no picture of \"guess\".*'logit_lens'.*to_dataframe"):
        replace(lens(), measure="guess").plot()


@pytest.mark.parametrize(
    ("result", "options", "message"),
    [
        (lens(), {"variable": "size"}, "variable='size'.*'log_prob', 'rank'"),
        (lens(), {"show": "all"}, "show='all'.*'top', 'value', 'none'"),
        (patching(), {"site": "mlp"}, "site='mlp'.*'resid_pre', 'attn'"),
        (patching(), {"show": "top"}, "show='top'.*'value', 'none'"),
        (paths(), {"panel": "pie"}, "panel='pie'.*'count', 'path_norm', 'histogram', 'share', 'starts'"),
        (paths(), {"panel": "branches"}, r"panel=\"branches\" needs .* by_branch=True"),
    ],
)
def test_an_unknown_choice_names_those_that_exist(result, options, message):
    with pytest.raises(ResultError, match=message):
        draw(result, **options)


def test_drawing_never_loads_torch():
    code = "import sys, resstream.plots; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# Tokens


@pytest.mark.parametrize(
    ("token", "seen"),
    [(" a", "·a"), ("\n", "\\n"), ("  ", "··"), ("\u200b", "\\u200b"), ("$", "$"), ("é", "é"), ("東", "東")],
)
def test_a_token_can_be_seen(token, seen):
    assert visible(token) == seen


def test_a_letter_that_no_font_has_is_spelled_out():
    assert spell(" \U0001fae8") == "·\\U0001fae8"
    assert spell("abcdef", 4) == "abc…"
    assert spell("") == "''"


def keeps_every_column(result, ax):
    """Whether each of the tokens has its own column, in order."""
    draw(result, ax)
    return cells(ax).shape[1] == len(TOKENS) and len(tick_labels(ax)) == len(TOKENS)


@pytest.mark.parametrize("make", [lens, patching])
def test_repeated_tokens_keep_their_columns(make, ax):
    assert keeps_every_column(make(), ax)
    assert [label for label in tick_labels(ax) if label.startswith("·John")] == (
        ["·John", "·John"] if make is lens else ["·John→·Mary", "·John"]
    )


@pytest.mark.parametrize("make", [lens, patching])
def test_columns_keyed_by_token_would_be_noticed(make, ax):
    result = make()
    first = [TOKENS.index(token) for token in dict.fromkeys(TOKENS)]
    assert not keeps_every_column(replace(result, data=result.data.isel(position=first)), ax)


@pytest.mark.parametrize("make", [lens, patching])
def test_a_long_prompt_keeps_its_columns_within_a_bounded_figure(make):
    found = draw(make(tokens=TOKENS * 60))
    assert cells(found).shape[1] == 420
    assert found.figure.get_size_inches()[0] <= 30
    assert 20 < len(tick_labels(found)) <= 420
    render(found)
    plt.close(found.figure)


@pytest.mark.parametrize("make", [lens, patching])
def test_a_figure_grows_with_its_tokens(make):
    short, long = draw(make(tokens=TOKENS[:4])), draw(make(tokens=TOKENS * 2))
    assert short.figure.get_size_inches()[0] < long.figure.get_size_inches()[0]
    plt.close("all")


# Logit lens


def shows(image, values):
    """Whether an image holds these values, the first row at the bottom."""
    return image.origin == "lower" and np.array_equal(np.ma.filled(image.get_array(), np.nan), values, equal_nan=True)


@pytest.mark.parametrize("variable", ["log_prob", "rank", "entropy", "kl", "loss"])
def test_the_lens_shows_its_values_with_the_first_layer_at_the_bottom(variable, ax):
    result = lens()
    draw(result, ax, variable=variable)
    values = result.data[variable].values[0]
    assert shows(ax.images[0], values)
    assert not shows(ax.images[0], values[::-1])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["embed", "0", "1", "2"]
    assert ax.get_ylabel() == "layer (resid_post)"
    assert ax.get_ylim()[0] < ax.get_ylim()[1]


@pytest.mark.parametrize(
    ("variable", "label"),
    [
        ("log_prob", "log-probability of “·Mary” (nats)"),
        ("rank", "rank of “·Mary” (1 = most likely)"),
        ("entropy", "entropy of the prediction (nats)"),
        ("kl", "KL divergence from\nthe last layer's prediction (nats)"),
        ("loss", "loss of the prompt's own next token (nats)"),
    ],
)
def test_the_lens_says_what_its_colours_mean(variable, label, ax):
    draw(lens(), ax, variable=variable)
    assert ax.figure.axes[1].get_ylabel() == label
    assert isinstance(ax.images[0].norm, LogNorm) == (variable == "rank")


def test_targets_that_differ_are_not_called_by_one_name(ax):
    result = lens()
    result.data["target_string"][0, 1] = " John"
    draw(result, ax)
    assert "the token\nthat the model predicts in the end" in ax.figure.axes[1].get_ylabel()


def test_the_cells_of_the_lens_hold_the_best_token_and_bold_marks_the_target():
    found = draw(lens())
    written = {(round(t.get_position()[0]), round(t.get_position()[1])): t for t in found.texts}
    assert [written[column, 0].get_text() for column in range(7)] == [visible(token) for token in TOKENS]
    assert {place for place, text in written.items() if text.get_weight() == "bold"} == {(1, 3)}
    assert not draw(lens(), show="none").texts
    assert draw(lens(), variable="rank", show="value").texts[0].get_text().isdigit()
    plt.close("all")


def test_a_shorter_prompt_has_fewer_columns(ax):
    assert cells(draw(lens(prompts=2), ax)).shape == (4, 7)
    assert cells(draw(lens(prompts=2), Figure().add_subplot(), prompt=1)).shape == (4, 6)


def test_sites_of_several_kinds_keep_their_names(ax):
    result = lens()
    sites = ["0.resid_pre", "0.resid_mid", "1.resid_pre", "2.resid_post"]
    draw(replace(result, data=result.data.assign_coords(site=sites)), ax)
    assert [label.get_text() for label in ax.get_yticklabels()][1:] == sites[1:]
    assert ax.get_ylabel() == "site"


def test_a_few_extreme_cells_do_not_take_all_colours(ax):
    result = lens(tokens=TOKENS * 3)
    result.data["log_prob"][0, 0, 0] = -1000.0
    image = draw(result, ax).images[0]
    assert image.norm.vmin > -100
    assert image.norm.vmax == result.data.log_prob.max()
    assert ax.figure.axes[1].get_ylabel()


# Activation patching


@pytest.mark.parametrize("site", [None, "attn"])
@pytest.mark.parametrize("prompt", [None, 1])
def test_the_patching_grid_shows_its_effects_around_zero(site, prompt, ax):
    result = patching(prompts=2)
    draw(result, ax, site=site, prompt=prompt)
    drawn = result.data.mean_effect if prompt is None else result.data.effect.isel(prompt=prompt)
    expected = drawn.sel(site=site or "resid_pre")
    assert shows(ax.images[0], expected.values)
    assert not shows(ax.images[0], expected.values[::-1])
    assert ax.images[0].norm.vmin == -ax.images[0].norm.vmax
    assert ax.images[0].norm.vmax == abs(expected).max()


@pytest.mark.parametrize(
    ("direction", "label"),
    [
        ("denoise", "share of the gap restored (denoise):\n0 as corrupted, 1 as clean"),
        ("noise", "share of the gap removed (noise):\n0 as clean, 1 as corrupted"),
    ],
)
@pytest.mark.parametrize("positions", [True, False])
def test_the_direction_of_patching_is_said(direction, label, positions, ax):
    draw(patching(direction=direction, positions=positions), ax)
    assert label == (ax.figure.axes[1] if positions else ax).get_ylabel()
    assert "clean 6.00, corrupted −5.00 logits" in ax.get_title(loc="left")


@pytest.mark.parametrize("positions", [True, False])
def test_without_any_effect_the_metric_is_drawn(positions, ax):
    result = patching(defined=False, positions=positions)
    draw(result, ax)
    label = (ax.figure.axes[1] if positions else ax).get_ylabel()
    assert label == "logit difference ' $Mary' − ' \\u6771' (logits);\nno effect, since both runs agree"
    metric = result.data.metric.isel(prompt=0, site=0)
    if positions:
        assert shows(ax.images[0], metric.values)
    else:
        assert np.array_equal(ax.lines[0].get_ydata(), metric.values)


def test_one_undefined_pair_does_not_hide_the_others(ax):
    result = patching(prompts=2)
    result.data["effect"][0] = np.nan
    draw(result, ax)
    assert shows(ax.images[0], result.data.mean_effect.values[0])


@pytest.mark.parametrize("prompts", [1, 3])
def test_without_positions_each_site_is_a_line_over_layers(prompts, ax):
    result = patching(positions=False, prompts=prompts)
    draw(result, ax)
    mean = result.data.mean_effect.values
    assert np.array_equal(ax.lines[0].get_ydata(), mean[0])
    assert np.array_equal(ax.lines[1].get_ydata(), mean[1])
    assert len(bands(ax)) == (0 if prompts == 1 else 2)
    assert ("95% intervals" in ax.get_title(loc="left")) == (prompts > 1)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["resid_pre", "attn"]
    only = draw(result, Figure().add_subplot(), site="attn")
    assert np.array_equal(only.lines[0].get_ydata(), mean[1])


def test_the_band_of_a_line_is_the_interval_over_pairs(ax):
    result = patching(positions=False, prompts=3)
    draw(result, ax, site="attn")
    (band,) = bands(ax)
    ends = result.data.sel(site="attn")
    for name, find in (("effect_low", min), ("effect_high", max)):
        at = [find(y for x, y in band.get_paths()[0].vertices if x == layer) for layer in range(3)]
        assert at == pytest.approx(ends[name].values)
    assert not bands(draw(result, Figure().add_subplot(), prompt=1))


def test_large_effects_are_written_so_that_grey_paper_keeps_the_sign():
    result = patching()
    found = draw(result, site="resid_pre")
    effects = result.data.effect.values[0, 0]
    large = np.abs(effects) >= 0.15 * np.abs(effects).max()
    assert len(found.texts) == large.sum()
    for text in found.texts:
        column, row = (round(place) for place in text.get_position())
        assert float(text.get_text().replace("−", "-")) == pytest.approx(effects[row, column], abs=0.006)
    plt.close("all")


def test_prompts_that_differ_are_labelled_by_position(ax):
    result = patching(prompts=2)
    result.data["token"][1, 2] = " or"
    assert tick_labels(draw(result, ax))[2] == "position 2"


# Ablation


@pytest.mark.parametrize("prompts", [1, 3])
def test_bars_are_mean_effects_and_points_are_prompts(prompts, ax):
    result = ablation(prompts=prompts)
    draw(result, ax)
    heights = [bar.get_height() for bar in ax.patches]
    assert heights == pytest.approx(result.data.effect.mean("prompt").values)
    points = [line.get_ydata() for line in ax.lines if line.get_marker() == "o"]
    assert np.array_equal(points, result.data.effect.values if prompts > 1 else [])
    assert ax.get_ylabel() == "change of logit difference ' $Mary' − ' \\u6771'\n(logits)"


def test_one_prompt_of_an_ablation_can_be_chosen(ax):
    result = ablation(prompts=3)
    draw(result, ax, prompt=2)
    assert [bar.get_height() for bar in ax.patches] == pytest.approx(result.data.effect.values[2])


def test_the_axis_of_an_ablation_says_what_was_done(ax):
    draw(ablation(unit="attn", how="mean"), ax)
    assert ax.get_xlabel() == "layer whose attention branch was replaced by its mean"
    assert tick_labels(ax) == [str(layer) for layer in range(8)]


# Path lengths


def test_a_figure_of_path_lengths_has_four_panels_over_one_axis():
    found = draw(paths())
    panels = found.figure.axes
    assert len(panels) == 4
    assert found is panels[2]
    assert len({panel.get_xlim() for panel in panels}) == 1
    assert [panel.get_yscale() for panel in panels] == ["log", "log", "linear", "linear"]
    assert "2⁸ paths through attention and MLP writes" in found.figure.get_suptitle()
    plt.close(found.figure)


def bars(ax):
    return [bar.get_height() for bar in ax.patches if bar.get_width() == pytest.approx(0.8)]


def bands(ax):
    return [each for each in ax.collections if isinstance(each, FillBetweenPolyCollection)]


@pytest.mark.parametrize(
    ("panel", "variable"), [(None, "veit"), ("histogram", "veit"), ("count", "count"), ("share", "share")]
)
@pytest.mark.parametrize("prompt", [0, 1])
def test_bars_are_what_the_panel_is_about(panel, variable, prompt, ax):
    result = paths(prompts=2)
    draw(result, ax, panel=panel, prompt=prompt)
    values = result.data[variable]
    assert bars(ax) == pytest.approx((values if variable == "count" else values[prompt]).values)
    assert f"prompt {prompt}" in ax.get_title(loc="left")


@pytest.mark.parametrize(("panel", "variable"), [("histogram", "veit"), ("share", "share")])
def test_several_prompts_are_a_mean_with_its_interval(panel, variable, ax):
    result = paths(prompts=3)
    draw(result, ax, panel=panel)
    mean = result.data[f"{variable}_mean"].values
    assert bars(ax) == pytest.approx(mean)
    (lines,) = [each for each in ax.collections if isinstance(each, LineCollection)]
    ends = np.array([segment[:, 1] for segment in lines.get_segments()])
    assert ends == pytest.approx(np.stack([mean - 0.1, mean + 0.2], axis=1))
    assert "mean of 3 prompts" in ax.get_title(loc="left")


def test_the_range_of_several_prompts_holds_enough_in_each(ax):
    draw(paths(prompts=2), ax)
    # Their own ranges are 1-4 and 2-8.
    held = sum(comb(8, length) for length in range(1, 9)) / 2**8
    assert f"lengths 1–8: 95% of the norm or more, in each prompt,\n{100 * held:.2g}% of all paths" in words(ax)


def test_the_kappas_of_several_prompts_are_a_range(ax):
    draw(paths(prompts=2, kappa=80.0), ax, panel="share")
    assert "κ = 80 to 160: lengths cancel" in words(ax)


def test_the_effective_range_is_shaded_and_its_share_of_paths_is_said(ax):
    draw(paths(), ax)
    (shade,) = [patch for patch in ax.patches if patch.get_width() > 1]
    assert (shade.get_x(), shade.get_x() + shade.get_width()) == (0.5, 4.5)
    assert "lengths 1–4: 95% of the norm,\n63% of all paths" in words(ax)


def test_an_interval_much_longer_than_the_bars_leaves_the_picture(ax):
    result = paths()
    result.data["path_norm_high"][0, 4] *= 100
    draw(result, ax)
    assert ax.get_ylim()[1] < 5 * result.data.veit.max()


def test_single_paths_come_with_two_statistics_and_their_intervals(ax):
    result = paths()
    draw(result, ax, panel="path_norm")
    mean, rms = ax.lines
    assert np.array_equal(mean.get_ydata(), result.data.path_norm.values[0])
    assert rms.get_ydata() == pytest.approx((result.data.rms / np.sqrt(result.data["count"])).values[0])
    assert (mean.get_linestyle(), rms.get_linestyle()) == ("-", "--")
    assert [text.get_text()[:4] for text in ax.get_legend().get_texts()] == ["mean", "root"]
    assert len(bands(ax)) == 2
    assert "bands: 95% intervals" in words(ax)
    assert "(logits per unit of stream)" in ax.get_ylabel()
    assert ax.get_yscale() == "log"


@pytest.mark.parametrize(("sampled", "signed", "label"), [(True, False, "mean"), (False, True, "root mean square")])
def test_either_statistic_of_single_paths_can_be_missing(sampled, signed, label, ax):
    draw(paths(sampled=sampled, signed=signed), ax, panel="path_norm")
    assert len(ax.lines) == len(bands(ax)) == 1
    assert ax.get_legend().get_texts()[0].get_text().startswith(label)


def test_an_interval_without_an_end_is_not_drawn(ax):
    result = paths(signed=False)
    result.data["path_norm_low"][:], result.data["path_norm_high"][:] = 0.0, np.inf
    draw(result, ax, panel="path_norm")
    assert not bands(ax)
    assert "95%" not in words(ax)
    assert ax.get_ylim()[1] < 10
    render(draw(result, Figure().add_subplot()))


def test_single_paths_of_several_prompts_have_a_thin_line_each(ax):
    result = paths(prompts=3)
    draw(result, ax, panel="path_norm")
    assert len(ax.lines) == 2 * (1 + 3)
    assert ax.lines[0].get_ydata() == pytest.approx(result.data.path_norm.mean("prompt").values)
    assert not bands(ax)
    assert "thin lines: each prompt" in words(ax)


@pytest.mark.parametrize(("kappa", "percent"), [(3.0, True), (1.9e4, False)])
def test_no_bare_percentages_where_lengths_cancel(kappa, percent, ax):
    draw(paths(kappa=kappa), ax, panel="share")
    text = words(ax)
    assert any(label.get_text().endswith("%") for label in ax.get_yticklabels()) == percent
    assert ("κ = 3" if percent else "κ = 1.9 × 10⁴: lengths cancel") in text
    assert "off by 1e-14" in text
    assert ("sums to 100%" if percent else "sums to 1)") in ax.get_ylabel()


@pytest.mark.parametrize("panel", [None, "path_norm"])
def test_without_samples_the_panel_says_so(panel, ax):
    draw(paths(sampled=False, signed=False), ax, panel=panel)
    assert "samples=0" in words(ax)
    found = draw(paths(sampled=False, signed=False))
    render(found)
    plt.close(found.figure)


@pytest.mark.parametrize("prompts", [1, 3])
def test_cancellation_is_drawn_over_the_start_layer(prompts, ax):
    result = paths(prompts=prompts, kappa=20.0)
    draw(result, ax, panel="starts")
    drawn = [line.get_ydata() for line in ax.lines if len(line.get_ydata()) == 4]
    assert len(drawn) == (1 if prompts == 1 else 1 + prompts)
    assert drawn[-1] == pytest.approx(result.data.kappa_from.values[0])
    assert ax.get_yscale() == "log"
    assert ax.get_xlabel().startswith("start layer")
    assert ("each prompt" in words(ax)) == (prompts > 1)


def test_branches_are_a_map_of_both_kinds_of_hops(ax):
    result = paths(branches=True)
    draw(result, ax, panel="branches")
    # The rows and columns that hold nothing are left out.
    assert shows(ax.images[0], result.data.branch_norm.values[0, :3, :4] / 2)
    assert isinstance(ax.images[0].norm, LogNorm)
    assert (ax.get_ylabel(), ax.get_xlabel().splitlines()[0]) == ("attention hops", "MLP hops")
    assert "κ = 21 times the gradient's" in ax.get_xlabel()


@pytest.mark.parametrize("panel", ["share", "starts", "branches"])
def test_one_panel_can_have_a_figure_of_its_own(panel):
    found = draw(paths(branches=True), panel=panel)
    assert found.figure.axes[0] is found
    render(found)
    plt.close(found.figure)


@pytest.mark.parametrize(
    ("value", "spelled"),
    [(0.0, "0"), (2.71, "2.7"), (266.4, "266"), (4820.0, "4.8 × 10³"), (19034.0, "1.9 × 10⁴"), (2e-5, "2.0 × 10⁻⁵")],
)
def test_numbers_are_spelled_in_two_digits(value, spelled):
    assert spell_number(value) == spelled


# Logits by path length


def test_terms_are_bars_and_their_sum_ends_at_the_logit(ax):
    result = logit_paths()
    draw(result, ax)
    terms = result.data.term.values[0]
    assert bars(ax) == pytest.approx(terms)
    colours = [bar.get_facecolor() for bar in ax.patches]
    assert colours[1] != colours[2] == colours[0]
    total, logit = ax.lines[:2]
    assert total.get_ydata() == pytest.approx(-0.5 + terms.cumsum())
    assert total.get_ydata()[-1] == pytest.approx(logit.get_ydata()[0])
    assert ax.get_xlim()[1] < 7


def test_a_logit_by_length_says_gauge_cancellation_and_what_is_what(ax):
    draw(logit_paths(), ax)
    name, gauge, kappa = ax.get_title(loc="left").splitlines()
    assert name == "logit difference ' $Mary' − ' \\u6771' in toy, by length of path"
    assert gauge == "gauge frozen: norm scales held fixed"
    assert kappa.startswith("κ = 5.2:")
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == ["for the answer", "against it", "sum up to this length", "the model's own: −2.00"]
    assert ax.get_ylabel().endswith("(logits)")


def test_a_logit_of_several_prompts_says_which_one(ax):
    assert draw(logit_paths(prompts=2), ax, prompt=1).get_title(loc="left").splitlines()[0].endswith(", prompt 1")
