from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rewards.remote.processes import no_thread_left
from visual_grpo.rewards.remote import client


@pytest.fixture(autouse=True)
def _nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(client, "FIRST_WAIT", 0.01)
    with no_thread_left():
        yield
