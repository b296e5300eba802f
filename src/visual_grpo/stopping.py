"""Ctrl-C between two steps: the first asks, the second insists."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class StopRequest:
    """Set once a SIGINT or SIGTERM has arrived."""

    def __init__(self) -> None:
        self.asked = False


@contextmanager
def stop_request(on_ask: Callable[[], None]) -> Iterator[StopRequest]:
    """Turns the first SIGINT or SIGTERM into ``asked``, so that a step can be finished and saved.

    A second one acts at once, as if nothing had been installed. Outside the main thread, where no
    handler can be installed, signals keep their meaning.
    """
    request = StopRequest()
    previous: dict[int, Any] = {}

    def ask(number: int, frame: FrameType | None) -> None:
        request.asked = True
        restore()
        on_ask()

    def restore() -> None:
        while previous:
            signal.signal(*previous.popitem())

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, ask)
    except ValueError:  # Not the main thread.
        pass
    try:
        yield request
    finally:
        restore()
