"""Counters and sorting on disk."""

from __future__ import annotations

import random
import tracemalloc

from visual_grpo.records.layouts.numbered import NumberedFiles
from visual_grpo.records.on_disk import DiskCounter, sorted_on_disk


def test_counts():
    with DiskCounter() as counter:
        assert [counter.add(key) for key in ("a", "b", "a", "猫", "a", "\ud800")] == [1, 1, 2, 1, 3, 1]
        assert [counter.count(key) for key in ("a", "b", "c")] == [3, 1, 0]


def test_two_counters_are_independent():
    with DiskCounter() as one, DiskCounter() as other:
        one.add("a")
        assert other.count("a") == 0


def test_sorted_by_bytes():
    names = [f"{number:04}" for number in range(2000)] + ["猫", "a b", "Z", "\udcff"]
    shuffled = random.Random(0).sample(names, len(names))
    assert list(sorted_on_disk(shuffled)) == sorted(names, key=lambda n: n.encode("utf-8", "surrogateescape"))


def test_python_memory_does_not_grow_with_the_number_of_keys():
    tracemalloc.start()
    try:
        with DiskCounter() as counter:
            for number in range(20_000):
                counter.add(f"a rather long id, so that a set of them would take megabytes {number:050}")
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_numbered_files():
    names = ["7.png", "007.jpg", "8.PNG", "x.png", "9" * 30 + ".png", "-1.png", "²" + ".png"]
    with NumberedFiles(names) as files:
        assert files.named(7) == ["007.jpg", "7.png"]
        assert files.named(8) == ["8.PNG"]
        assert files.named(9) == []
        assert files.count_from(8) == 1
