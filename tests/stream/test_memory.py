"""Peak memory against sizes that are known."""

from __future__ import annotations

import torch

from resstream.stream.memory import peak_bytes

KIB = 1024


def make(kib):
    return torch.zeros(kib * KIB // 4)


def test_what_is_held_at_once_counts():
    def work():
        first, second = make(8), make(16)
        return first, second

    assert peak_bytes(work) == 24 * KIB


def test_what_is_freed_counts_no_more():
    """A chain of sums holds two terms at a time, however long it is."""

    def chain(length):
        value = make(8)
        for _ in range(length):
            value = value + 1
        return value

    assert peak_bytes(lambda: chain(1)) == peak_bytes(lambda: chain(50)) == 16 * KIB


def test_views_and_changes_in_place_take_nothing():
    def work():
        value = make(8)
        value.add_(1)
        return value.view(-1, 2)[:100].T

    assert peak_bytes(work) == 8 * KIB


def test_what_was_there_before_is_not_counted():
    before = make(64)
    assert peak_bytes(lambda: before[:KIB] + 1) == 4 * KIB


def test_work_after_the_peak_does_not_hide_it():
    def work():
        make(32)
        return make(8)

    assert peak_bytes(work) == 32 * KIB


def test_rows_take_memory_in_proportion(smollm2):
    """What the executor relies on: twice the rows take about twice the memory of a layer."""

    def of(rows):
        tokens = smollm2.tokenize("The Eiffel Tower is in the city of").take([0] * rows)

        def work():
            with torch.no_grad():
                trunk = smollm2.trunk(tokens)
                return trunk.layer(0, trunk.x0)

        return peak_bytes(work)

    assert 1.8 < of(16) / of(8) < 2.1
