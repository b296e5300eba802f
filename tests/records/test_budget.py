"""What threads hold at a time is bounded."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import pytest

from visual_grpo.records.budget import Budget


def test_no_more_than_all_is_taken_at_a_time_and_everyone_gets_a_turn():
    budget, lock, dice = Budget(10), Lock(), random.Random(0)
    held = most = 0

    def work(amount):
        nonlocal held, most
        with budget.taken(amount):
            with lock:
                held += min(amount, 10)
                most = max(most, held)
            time.sleep(0.001)
            with lock:
                held -= min(amount, 10)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [*(dice.randint(0, 6) for _ in range(100)), 10, 1000]))
    assert held == 0
    assert 5 < most <= 10


def test_what_a_block_took_is_given_back_when_it_fails():
    budget = Budget(1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), budget.taken(1):
            raise ZeroDivisionError
