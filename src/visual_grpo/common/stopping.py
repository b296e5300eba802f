"""The first Ctrl-C (or SIGTERM, or SIGHUP) lets a training save itself and stop; the second aborts."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

TERMINATING = (signal.SIGTERM, signal.SIGHUP)
"""Sent by ``kill`` and batch systems, and by a terminal that is closed."""
_ONE_STOP = 5.0
"""Seconds in which the same signal of them means the same."""


class Stopped(KeyboardInterrupt):
    """A signal ended the command."""

    def __init__(self, number: signal.Signals = signal.SIGINT) -> None:
        super().__init__()
        self.number = number


def signal_of(interrupt: KeyboardInterrupt) -> signal.Signals:
    """Returns which signal it was: Python itself raises a plain KeyboardInterrupt at Ctrl-C."""
    return interrupt.number if isinstance(interrupt, Stopped) else signal.SIGINT


class StopRequest:
    """``by`` is the signal that has arrived, SIGINT or one of `TERMINATING`; None so far."""

    def __init__(self) -> None:
        self.by: signal.Signals | None = None


@contextmanager
def stop_request(on_ask: Callable[[], None]) -> Iterator[StopRequest]:
    """Keeps the first SIGINT, SIGTERM or SIGHUP, so that what is being done can be finished and saved.

    A second signal acts at once; but a batch system and a launcher may both pass on the same one of `TERMINATING`,
    which is one stop if both come within seconds.
    """
    request = StopRequest()
    asked = time.monotonic()

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if request.by is not None:
            if number != request.by or time.monotonic() - asked > _ONE_STOP:
                _restore(previous)
                signal.raise_signal(number)
            return
        request.by, asked = signal.Signals(number), time.monotonic()
        if number not in TERMINATING:
            _restore(previous)
        _forget_a_closed_terminal(number)
        on_ask()

    previous = _handle(ask, signal.SIGINT, *TERMINATING)
    try:
        yield request
    finally:
        _restore(previous)


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Raises `Stopped` at the signals that are `TERMINATING`, as Ctrl-C raises KeyboardInterrupt."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        _forget_a_closed_terminal(number)
        raise Stopped(signal.Signals(number))

    previous = _handle(interrupt, *TERMINATING)
    try:
        yield
    finally:
        _restore(previous)


@contextmanager
def held_back() -> Iterator[None]:
    """Lets signals act when the block has ended: their handlers may raise anywhere, such as in a half-done start."""
    arrived: list[int] = []
    previous = _handle(lambda number, frame: arrived.append(number), signal.SIGINT, *TERMINATING)
    try:
        yield
    finally:
        _restore(previous)
        for number in arrived:
            signal.raise_signal(number)


def _handle(handler: Callable[[int, FrameType | None], object], *numbers: signal.Signals) -> dict[int, Any]:
    """Installs a handler, and returns those before; not for SIGTERM and SIGHUP where they are ignored (``nohup``).

    Outside the main thread no handler can be installed, and signals act as usual.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    heard = [n for n in numbers if n not in TERMINATING or signal.getsignal(n) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def _restore(previous: dict[int, Any]) -> None:
    while previous:
        signal.signal(*previous.popitem())


def _forget_a_closed_terminal(number: int) -> None:
    """After SIGHUP, writing to the terminal fails, which must not end what is being saved."""
    if number != signal.SIGHUP:
        return
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and stream.isatty():
                os.dup2(nowhere.fileno(), stream.fileno())
