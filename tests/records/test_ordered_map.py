"""A function mapped over a stream with several threads."""

from __future__ import annotations

import itertools
import time

import pytest

from visual_grpo.records.ordered_map import ordered_map


def test_results_come_in_order_whichever_is_done_first():
    def slow_when_even(number):
        time.sleep(0.01 * (number % 2 == 0))
        return number * 10

    assert list(ordered_map(slow_when_even, range(20), threads=4)) == list(range(0, 200, 10))


def test_an_endless_stream_is_read_only_a_little_ahead():
    items = itertools.count()
    results = ordered_map(str, items, threads=2)
    assert [next(results) for _ in range(3)] == ["0", "1", "2"]
    assert next(items) <= 3 + 8


def test_an_exception_is_passed_on():
    with pytest.raises(ZeroDivisionError):
        list(ordered_map(lambda number: 1 // number, [2, 1, 0], threads=2))
