"""CPU seconds of this process by phase; of methods too, without a change to what owns them."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Seconds = dict[str, float]
"""Phase -> process CPU seconds."""


@contextlib.contextmanager
def phase(seconds: Seconds, name: str) -> Iterator[None]:
    """Adds what happens inside to ``seconds[name]``."""
    started = time.process_time()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.process_time() - started


@contextlib.contextmanager
def phases_of_methods(seconds: Seconds, methods: Sequence[tuple[object, str, str]]) -> Iterator[None]:
    """While inside, every call of an (object, its method's name, phase) adds to that phase; none may call another."""
    for owner, method, name in methods:
        setattr(owner, method, _timed(getattr(owner, method), seconds, name))
    try:
        yield
    finally:
        for owner, method, _ in methods:
            delattr(owner, method)  # The class's own shows again.


def medians(rounds: Sequence[Seconds]) -> Seconds:
    """Of each phase over the rounds."""
    return {name: statistics.median(seconds[name] for seconds in rounds) for name in rounds[0]}


def _timed(function: Callable[..., Any], seconds: Seconds, name: str) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
        with phase(seconds, name):
            return function(*arguments, **named)

    return run
