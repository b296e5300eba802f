"""What threads hold at a time is bounded."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock

import pytest

from tests.records.making import picture
from visual_grpo.records.budget import Budget
from visual_grpo.records.image_store import ImageStore


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


class Watched(Budget):
    """Notes what is taken."""

    def __init__(self, most):
        super().__init__(most)
        self.amounts = []
        self.held = self.most_held = 0

    @contextmanager
    def taken(self, amount):
        with super().taken(amount):
            self.amounts.append(amount)
            self.held += amount
            self.most_held = max(self.most_held, self.held)
            yield
            self.held -= amount


def test_images_are_decoded_within_the_budget_of_pixels_and_bytes(tmp_path):
    files = [picture(tmp_path / f"{n}.png", (40 + n, 50), (n, 0, 0)) for n in range(12)]
    sizes = [file.stat().st_size for file in files]
    pixels, opened = Watched(51 * 50), Watched(max(sizes))
    store = ImageStore(folder=tmp_path / "out", height=32, width=32, max_pixels=51 * 50, pixels=pixels, bytes=opened)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda file: store.prepare(file, file.stem, "target"), files))
    assert sorted(pixels.amounts) == [(40 + n) * 50 for n in range(12)]
    assert sorted(opened.amounts) == sorted(2 * sizes), "for the header, and for the pixels"
    assert 0 < pixels.most_held <= 51 * 50
    assert 0 < opened.most_held <= max(sizes)
