"""The first Ctrl-C (or SIGTERM) lets a training save itself and stop; the second aborts."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stopped(KeyboardInterrupt):
    """A signal ended the command."""

    def __init__(self, number: signal.Signals = signal.SIGINT) -> None:
        super().__init__()
        self.number = number


def signal_of(interrupt: KeyboardInterrupt) -> signal.Signals:
    """Which signal it was: Python itself raises a plain KeyboardInterrupt at Ctrl-C."""
    return interrupt.number if isinstance(interrupt, Stopped) else signal.SIGINT


class StopRequest:
    """``by`` is the signal that has arrived, SIGINT or SIGTERM; None so far."""

    def __init__(self) -> None:
        self.by: signal.Signals | None = None


@contextmanager
def stop_request(on_ask: Callable[[], None]) -> Iterator[StopRequest]:
    """Keeps the first SIGINT or SIGTERM, so that what is being done can be finished and saved.

    The handlers are then removed, so that a second signal acts at once. Outside the main thread no handler can be
    installed, and signals act as usual.
    """
    request = StopRequest()
    previous: dict[int, Any] = {}

    def ask(number: int, frame: FrameType | None) -> None:
        request.by = signal.Signals(number)
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


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Raises `Stopped` at SIGTERM (``kill``, a batch system's time limit), as Ctrl-C raises KeyboardInterrupt."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Stopped(signal.Signals(number))

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # Not the main thread.
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
