"""Site names: what is one, which a model has, and what the message suggests instead."""

from __future__ import annotations

import pytest

from resstream.errors import ResstreamError, SiteError
from resstream.sites import BOUNDARIES, KINDS, WRITES, Site, layers_from, parse_site


def parse(text, n_layers=30, **kwargs):
    return parse_site(text, n_layers=n_layers, model="smollm2", **kwargs)


@pytest.mark.parametrize("kind", ["resid_pre", "resid_mid", "resid_post", "attn", "mlp"])
@pytest.mark.parametrize("layer", [0, 7, 29])
def test_a_name_and_its_site_are_one(layer, kind):
    site = parse(f"{layer}.{kind}")
    assert site == Site(layer, kind)
    assert str(site) == f"{layer}.{kind}"
    assert parse(site) == site


def test_the_kinds():
    assert (*BOUNDARIES, *WRITES) == KINDS
    assert [kind for kind in KINDS if Site(0, kind).is_write] == ["attn", "mlp"]


def test_the_ends_are_boundaries():
    assert parse("embed") == Site(0, "resid_pre")
    assert parse("final") == Site(29, "resid_post")
    assert parse("final", n_layers=1) == Site(0, "resid_post")


@pytest.mark.parametrize(
    ("asked", "suggested"),
    [
        ("31.resid_pre", "29.resid_pre"),
        ("30.attn", "29.attn"),
        ("5.resid_prev", "5.resid_pre"),
        ("5.resid", "5.resid_pre"),
        ("99.resid_prev", "29.resid_pre"),
        ("5.attention", "5.attn"),
        ("5.mlp_out", "5.mlp"),
        ("5.zzz", "5.resid_post"),
        ("resid_post", "0.resid_post"),
        ("embedding", "embed"),
        ("finale", "final"),
        ("5.5.attn", "5.attn"),
        ("", "0.resid_post"),
        ("5. attn", "5.attn"),
    ],
)
def test_what_is_no_site_is_refused_with_the_nearest(asked, suggested):
    with pytest.raises(SiteError) as caught:
        parse(asked)
    assert str(caught.value).startswith(f'no site "{asked}": smollm2 has ')
    assert str(caught.value).endswith(f'did you mean "{suggested}"?')
    assert parse(suggested), "what is suggested exists"
    assert isinstance(caught.value, ResstreamError)


def test_the_message_names_the_layers_and_the_kinds():
    with pytest.raises(SiteError) as caught:
        parse("5.zzz")
    assert str(caught.value) == (
        'no site "5.zzz": smollm2 has "embed", "final" and, for each layer L of 0-29, '
        'L.resid_pre, L.resid_mid, L.resid_post, L.attn, L.mlp; did you mean "5.resid_post"?'
    )
    with pytest.raises(SiteError) as caught:
        parse(Site(31, "resid_pre"))
    assert str(caught.value) == 'no site "31.resid_pre": smollm2 has layers 0-29; did you mean "29.resid_pre"?'


def test_a_parallel_block_has_no_middle():
    assert parse("5.resid_mid") == Site(5, "resid_mid")
    with pytest.raises(SiteError, match=r'no middle; use "5\.resid_pre" or "5\.resid_post"'):
        parse("5.resid_mid", parallel=True)
    for kind in ("resid_pre", "resid_post", "attn", "mlp"):
        assert parse(f"5.{kind}", parallel=True) == Site(5, kind)


@pytest.mark.parametrize(
    ("asked", "layers"),
    [("each", [0, 1, 2]), (1, [1]), (-1, [2]), ([2, 0], [2, 0]), ((0, -3), [0, 0]), (range(2), [0, 1]), ([], [])],
)
def test_choices_of_layers(asked, layers):
    assert layers_from(asked, n_layers=3, model="toy") == layers


@pytest.mark.parametrize(("asked", "named"), [(3, 3), (-4, -4), ([0, 7], 7), (range(5), 3)])
def test_layers_that_a_model_does_not_have_are_refused(asked, named):
    with pytest.raises(SiteError, match=rf"no layer {named}: toy has layers 0-2"):
        layers_from(asked, n_layers=3, model="toy")


def test_words_that_are_no_choice_of_layers_are_refused():
    with pytest.raises(SiteError, match=r'layers="all" is not a choice of layers; write layers="each" or a list'):
        layers_from("all", n_layers=3, model="toy")
