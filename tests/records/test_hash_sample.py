"""A sample by hash."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

import tests.same_examples  # noqa: F401
from visual_grpo.records.hash_sample import DIGITS, HashSample


def sample(keys: list[str], size: int) -> HashSample[str]:
    made: HashSample[str] = HashSample(size)
    for key in keys:
        made.add(key, f"item {key}")
    return made


KEYS = st.lists(st.text("abcdef", max_size=2), max_size=120)


@given(KEYS, st.integers(1, 9), st.randoms())
def test_neither_order_nor_size_changes_what_is_found_of_a_key(keys, size, random):
    found = list(sample(keys, size).items())
    everything = list(sample(keys, 1000).items())
    assert found == everything[:size]
    assert {item.removeprefix("item "): count for _, item, count in everything} == Counter(keys)
    random.shuffle(keys)
    shuffled = sample(keys, size)
    assert list(shuffled.items()) == found
    assert shuffled.complete == (len(everything) <= size)


def test_a_sample_is_not_biased_towards_a_part_of_the_data():
    keys = [f"prompt {number}" for number in range(4000)]
    chosen = [int(item.rpartition(" ")[2]) for _, item, _ in sample(keys, 1000).items()]
    assert 1900 < sum(chosen) / 1000 < 2100
    assert all(len(hashed) == DIGITS for hashed, _, _ in sample(keys, 10).items())
