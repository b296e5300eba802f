"""The first Ctrl-C (or SIGTERM) finishes the current step and stops; the second aborts."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class StopRequest:
    """``asked`` is True once a SIGINT or SIGTERM has arrived."""

    def __init__(self) -> None:
        self.asked = False


@contextmanager
def stop_request(on_ask: Callable[[], None]) -> Iterator[StopRequest]:
    """Sets ``asked`` at the first SIGINT or SIGTERM, so that the current step can be finished and saved.

    The handlers are then removed, so that a second signal acts at once. Outside the main thread no handler can be
    installed, and signals act as usual.
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
