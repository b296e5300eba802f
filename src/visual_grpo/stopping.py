"""The first Ctrl-C (or SIGTERM, or SIGHUP) lets a training save itself and stop; the second aborts."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

TERMINATING = (signal.SIGTERM, signal.SIGHUP)
"""Of ``kill`` and batch systems, and of a terminal that is closed."""

_ONE_STOP = 5.0
"""Seconds in which the same signal of them means the same."""


class Stopped(KeyboardInterrupt):
    """A signal ended the command."""

    def __init__(self, number: signal.Signals = signal.SIGINT) -> None:
        super().__init__()
        self.number = number


def signal_of(interrupt: KeyboardInterrupt) -> signal.Signals:
    """Which signal it was: Python itself raises a plain KeyboardInterrupt at Ctrl-C."""
    return interrupt.number if isinstance(interrupt, Stopped) else signal.SIGINT


class StopRequest:
    """``by`` is the signal that has arrived, SIGINT or one of `TERMINATING`; None so far."""

    def __init__(self) -> None:
        self.by: signal.Signals | None = None


@contextmanager
def stop_request(on_ask: Callable[[], None]) -> Iterator[StopRequest]:
    """Keeps the first SIGINT, SIGTERM or SIGHUP, so that what is being done can be finished and saved.

    The handlers are then removed, so that a second signal acts at once; but a batch system and a launcher may both pass
    on the same one of `TERMINATING`, which is one stop if both come within seconds. Outside the main thread no handler
    can be installed, and signals act as usual.
    """
    request = StopRequest()
    previous: dict[int, Any] = {}
    asked = time.monotonic()

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if request.by is not None:
            if number != request.by or time.monotonic() - asked > _ONE_STOP:
                restore()
                signal.raise_signal(number)
            return
        request.by, asked = signal.Signals(number), time.monotonic()
        if number not in TERMINATING:
            restore()
        _forget_a_closed_terminal(number)
        on_ask()

    def restore() -> None:
        while previous:
            signal.signal(*previous.popitem())

    try:
        for number in (signal.SIGINT, *_heard()):
            previous[number] = signal.signal(number, ask)
    except ValueError:  # Not the main thread.
        pass
    try:
        yield request
    finally:
        restore()


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Raises `Stopped` at the signals that are `TERMINATING`, as Ctrl-C raises KeyboardInterrupt."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        _forget_a_closed_terminal(number)
        raise Stopped(signal.Signals(number))

    try:
        before = {number: signal.signal(number, interrupt) for number in _heard()}
    except ValueError:  # Not the main thread.
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _heard() -> list[signal.Signals]:
    """Those that end the process: ``nohup`` lets it ignore SIGHUP."""
    return [number for number in TERMINATING if signal.getsignal(number) != signal.SIG_IGN]


def _forget_a_closed_terminal(number: int) -> None:
    """After SIGHUP, writing to the terminal fails, which must not end what is being saved."""
    if number != signal.SIGHUP:
        return
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and stream.isatty():
                os.dup2(nowhere.fileno(), stream.fileno())
