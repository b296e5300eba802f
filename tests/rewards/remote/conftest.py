from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from visual_grpo.rewards.remote import client


@pytest.fixture(autouse=True)
def _no_thread_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(client, "FIRST_WAIT", 0.01)
    before = set(threading.enumerate())
    yield
    end = time.monotonic() + 2
    while (left := [t for t in threading.enumerate() if t not in before]) and time.monotonic() < end:
        time.sleep(0.01)
    assert left == []
