"""Patterns of fused attention against torch's own fused attention, whose output they must explain."""

from __future__ import annotations

import pytest
import torch
from tiny import apart
from torch import nn
from torch.nn import functional

from resstream.models.pattern import fused_pattern, patterns

RNG = torch.Generator().manual_seed(0)
QUERY, KEY, VALUE = (torch.randn(2, heads, length, 8, generator=RNG) for heads, length in ((4, 5), (2, 7), (2, 7)))
BLIND = torch.rand(2, 1, 5, 7, generator=RNG) > 0.4
BLIND[0, 0, 3] = False
SETTINGS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "a mask of what may be seen, nothing in one row": {"attn_mask": BLIND},
    "a mask that is added": {"attn_mask": torch.randn(5, 7, generator=RNG)},
}


class Attention(nn.Module):
    """Fused attention with fixed settings."""

    def __init__(self, **settings):
        super().__init__()
        self.settings = settings

    def forward(self, query, key, value):
        return functional.scaled_dot_product_attention(query, key, value, enable_gqa=True, **self.settings)


@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_pattern_times_values_is_what_fused_attention_returns(case, dtype, close):
    query, key, value = (each.to(dtype) for each in (QUERY, KEY, VALUE))
    expected = Attention(**SETTINGS[case])(query, key, value)
    pattern = fused_pattern(query, key, enable_gqa=True, **SETTINGS[case])
    spread = value.repeat_interleave(2, 1)
    assert apart(pattern.to(dtype) @ spread, expected) < close
    assert apart(1.01 * pattern.to(dtype) @ spread, expected) > 0.005, "and an error would show"


@pytest.mark.parametrize("case", SETTINGS)
def test_a_changed_pattern_is_what_mixes_the_values(case):
    attention, mixed = Attention(**SETTINGS[case]), torch.full((2, 4, 5, 7), 1 / 7)
    plain = attention(QUERY, KEY, VALUE)
    with patterns(attention, lambda pattern: mixed):
        found = attention(QUERY, KEY, VALUE)
    assert apart(found, VALUE.repeat_interleave(2, 1).mean(2, keepdim=True).expand_as(found)) < 1e-6
    with patterns(attention, lambda pattern: pattern):
        assert torch.equal(attention(QUERY, KEY, VALUE), plain)
    assert torch.equal(attention(QUERY, KEY, VALUE), plain)


@pytest.mark.parametrize("softmax", [torch.softmax, torch.Tensor.softmax, functional.softmax])
def test_a_softmax_inside_the_module_is_seen_and_one_outside_is_not(softmax):
    class Plain(nn.Module):
        def forward(self, scores):
            return softmax(scores, dim=-1)

    attention, scores, seen = Plain(), torch.randn(2, 3, generator=RNG), []
    with patterns(attention, lambda pattern: seen.append(pattern) or 2 * pattern):
        outside, inside = scores.softmax(-1), attention(scores)
    (pattern,) = seen
    assert torch.equal(pattern, outside)
    assert torch.equal(inside, 2 * outside)


def test_nothing_stays_behind_also_after_an_error():
    attention, scores = Attention(), (QUERY, KEY, VALUE)
    before = len(torch.overrides._get_current_function_mode_stack())

    def fail(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), patterns(attention, fail):
        attention(*scores)
    assert len(torch.overrides._get_current_function_mode_stack()) == before
    assert not attention._forward_hooks
    assert not attention._forward_pre_hooks
