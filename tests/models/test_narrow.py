"""Trunks of the first rows of a batch, against opening the stream for those rows anew."""

from __future__ import annotations

import pytest
import torch
from tiny import LAYERS, SUPPORTED, apart, some_ids

import resstream as rs
from resstream.models import causal_lm
from resstream.models.calls import Call
from resstream.models.narrow import narrow_calls
from resstream.models.tokens import Tokens
from resstream.models.trunk import TOLERANCE
from resstream.sites import Site

CLOSE = TOLERANCE[torch.float32]
# ALiBi's slopes come as one long axis of batch times heads, which no row can be cut from by its number alone.
OPENED_ANEW = ("bloom",)


@pytest.fixture(scope="module", params=SUPPORTED)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(name):
    return rs.load(SUPPORTED[name](), name=name)


def batch(lengths):
    return Tokens(some_ids(len(lengths), max(lengths)), tuple(lengths), ((),) * len(lengths))


def the_first_rows_are_the_same(name, model, lengths, until=0):
    tokens = batch(lengths)
    left = None
    if until:
        base = model.trunk(tokens, keep=True)
        base.run()
        left = base.left.take(range(len(lengths)), until=until)
    many = model.trunk(tokens, left=left)
    some = many.first(2)
    if name in OPENED_ANEW:
        assert some is None
        return
    cut = None if left is None else left.take(range(2), until=until)
    anew = model.trunk(tokens.take(range(2)), left=cut)
    assert apart(some.x0, anew.x0) == 0
    x = anew.x0 + torch.randn(anew.x0.shape, generator=torch.Generator().manual_seed(0))
    for layer in range(LAYERS):
        for kind in ("attn", "mlp"):
            found, expected = (trunk.write(Site(layer, kind), x) for trunk in (some, anew))
            assert apart(found, expected) < CLOSE, "padding included: it shows whose masks these are"
        found, expected = (trunk.layer(layer, x) for trunk in (some, anew))
        assert apart(found, expected) < CLOSE, "padding included: it shows whose masks these are"
        x = expected


@pytest.mark.parametrize("lengths", [(5, 5, 5, 5), (3, 5, 4, 5)], ids=["equal", "padded"])
def test_the_first_rows_are_the_same(lengths, name, model):
    """Four rows of five positions and four heads: sizes that are easily taken for one another."""
    with torch.no_grad():
        the_first_rows_are_the_same(name, model, lengths)


@pytest.mark.parametrize("lengths", [(6, 6, 6, 6, 6), (5, 6, 4, 6, 6)], ids=["equal", "padded"])
def test_the_first_rows_of_a_suffix_are_the_same(lengths, name, model):
    with torch.no_grad():
        the_first_rows_are_the_same(name, model, lengths, until=2)


@pytest.mark.parametrize("name", ["llama", "gemma2"], indirect=True)
def test_rows_that_are_not_the_first_are_noticed(name, model, monkeypatch):
    """The twin of the tests above: the last rows' masks are taken instead."""
    real = causal_lm.narrow_calls

    def last(calls, wider, rows, cache):
        def turned(call):
            return Call(*(_reversed(part) for part in (call.args, call.kwargs)), call.key)

        return real([turned(call) for call in calls], [turned(call) for call in wider], rows, cache)

    monkeypatch.setattr(causal_lm, "narrow_calls", last)
    with torch.no_grad(), pytest.raises(AssertionError):
        the_first_rows_are_the_same(name, model, (3, 5, 5, 4))


def _reversed(value):
    if isinstance(value, torch.Tensor):
        return value.flip(0)
    if isinstance(value, (tuple, list)):
        return type(value)(map(_reversed, value))
    return {name: _reversed(each) for name, each in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize(
    ("value", "wider"),
    [
        (torch.zeros(4, 3), torch.zeros(6, 3)),
        (torch.zeros(4, 3), torch.zeros(5, 4)),
        (torch.zeros(4), None),
        (object(), object()),
        (3, 4),
        ((1, 2), (1, 2, 3)),
    ],
)
def test_what_does_not_show_the_batch_is_left_alone(value, wider):
    calls = [Call((None, each), {}, 0) for each in (value, wider)]
    assert narrow_calls(calls[:1], calls[1:], 2, None) is None


def test_only_what_grew_is_cut():
    """A table of as many rows as the batch has is not the batch's."""
    table, mask = torch.arange(4), torch.arange(4)
    (call,) = narrow_calls(
        [Call((None, table), {"mask": mask}, 0)], [Call((None, table), {"mask": torch.arange(5)}, 0)], 2, None
    )
    assert (call.args[1].tolist(), call.kwargs["mask"].tolist()) == ([0, 1, 2, 3], [0, 1])
