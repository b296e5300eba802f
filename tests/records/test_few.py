"""Splits of a few records."""

from __future__ import annotations

import pytest

from visual_grpo.records.few import is_enough, shares_that_do, split_counts
from visual_grpo.records.split import SPLITS

KEYS = [(str(number), f"prompt {number}") for number in range(5)]


def test_shares_that_leave_no_split_empty_are_near_the_given_ones() -> None:
    given = (0.0, 0.0, 0.0)
    assert not is_enough(split_counts(KEYS, given))
    found = shares_that_do(KEYS, given)
    assert found is not None
    counts = split_counts(KEYS, found)
    assert min(counts[split] for split in ("train", "eval", "held_out")) > 0
    assert counts.total() == 5


def test_two_records_are_one_to_train_on_and_one_to_evaluate() -> None:
    found = shares_that_do(KEYS[:2], (0.1, 0.25, 0.0))
    assert found is not None
    assert is_enough(split_counts(KEYS[:2], found))


def test_a_sealed_share_is_kept_where_something_is_left_beside_it() -> None:
    keys = [(str(number), f"prompt {number}") for number in range(40)]
    found = shares_that_do(keys, (0.0, 0.0, 0.2))
    assert found is not None
    assert found[2] == 0.2
    assert min(split_counts(keys, found)[split] for split in SPLITS) > 0
    all_sealed = (0.0, 0.0, 0.999)
    assert not is_enough(split_counts(KEYS, all_sealed))
    assert shares_that_do(KEYS, all_sealed) == shares_that_do(KEYS, (0.0, 0.0, 0.0))


@pytest.mark.parametrize("keys", [KEYS[:1], []])
def test_no_shares_split_a_single_record(keys: list[tuple[str, str]]) -> None:
    assert shares_that_do(keys, (0.1, 0.25, 0.0)) is None
