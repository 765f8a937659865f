"""Site names: what is one, which a model has, and what the message suggests instead."""

from __future__ import annotations

import pytest

from resstream.errors import ResstreamError, SiteError
from resstream.sites import BOUNDARIES, INSIDE, KINDS, WRITES, Site, check_part, layers_from, parse_site


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
        ("5.heads.3", "5.head"),
        ("5.patern", "5.pattern"),
        ("5.neurons", "5.neuron"),
        ("5.attn.3", "5.attn"),
        ("5.mlp.17", "5.mlp"),
        ("5.resid_pre.0", "5.resid_pre"),
        ("31.head.3", "29.head.3"),
    ],
)
def test_what_is_no_site_is_refused_with_the_nearest(asked, suggested):
    with pytest.raises(SiteError) as caught:
        parse(asked)
    assert str(caught.value).startswith(f'no site "{asked}": ')
    assert str(caught.value).endswith(f'did you mean "{suggested}"?')
    assert parse(suggested), "what is suggested exists"
    assert isinstance(caught.value, ResstreamError)


def test_the_message_names_the_layers_and_the_kinds():
    with pytest.raises(SiteError) as caught:
        parse("5.zzz")
    assert str(caught.value) == (
        'no site "5.zzz": smollm2 has "embed", "final" and, for each layer L of 0-29, '
        "L.resid_pre, L.resid_mid, L.resid_post, L.attn, L.mlp, and inside its branches L.head, L.z, L.q, L.k, L.v, "
        'L.pattern, L.neuron, whole or one part, such as L.head.3; did you mean "5.resid_post"?'
    )
    with pytest.raises(SiteError) as caught:
        parse(Site(31, "resid_pre"))
    assert str(caught.value) == 'no site "31.resid_pre": smollm2 has layers 0-29; did you mean "29.resid_pre"?'


@pytest.mark.parametrize("kind", INSIDE)
@pytest.mark.parametrize("part", [None, 0, 17])
def test_a_place_inside_a_branch_and_its_name_are_one(kind, part):
    name = f"5.{kind}" if part is None else f"5.{kind}.{part}"
    site = parse(name)
    assert site == Site(5, kind, part)
    assert str(site) == name
    assert parse(site) == site
    assert (site.is_inside, site.is_write, site.whole) == (True, False, Site(5, kind))
    assert site.branch == ("mlp" if kind == "neuron" else "attn")
    assert parse(name, parallel=True) == site


def test_what_lies_on_the_stream_is_not_inside_a_branch():
    assert not any(Site(0, kind).is_inside for kind in KINDS)
    assert [Site(0, kind).branch for kind in WRITES] == ["attn", "mlp"]
    for kind in BOUNDARIES:
        with pytest.raises(SiteError, match=f'"0.{kind}" is a state of the stream, in no branch; .*"0.attn"'):
            Site(0, kind).branch  # noqa: B018


def test_a_number_where_there_are_no_parts_is_refused_with_what_has_them():
    with pytest.raises(SiteError, match=r'"attn" has no numbered parts, only head, z, .* have, such as "5\.head\.3"'):
        parse("5.attn.3")


@pytest.mark.parametrize(
    ("name", "parts", "message"),
    [
        ("5.k.3", 3, 'no site "5.k.3": smollm2 has key/value heads 0-2 in each layer; did you mean "5.k.2"?'),
        ("5.v.9", 3, 'no site "5.v.9": smollm2 has key/value heads 0-2 in each layer; did you mean "5.v.2"?'),
        ("5.head.9", 9, 'no site "5.head.9": smollm2 has query heads 0-8 in each layer; did you mean "5.head.8"?'),
        ("5.neuron.4", 4, 'no site "5.neuron.4": smollm2 has neurons 0-3 in each layer; did you mean "5.neuron.3"?'),
    ],
)
def test_a_part_that_is_not_there_is_refused_with_the_nearest(name, parts, message):
    with pytest.raises(SiteError) as caught:
        check_part(parse(name), parts, model="smollm2")
    assert str(caught.value) == message
    last = Site(5, parse(name).kind, parts - 1)
    assert check_part(last, parts) == last
    assert check_part(last.whole, parts) == last.whole


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
