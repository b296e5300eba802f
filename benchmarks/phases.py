"""Measures this process's CPU seconds by phase, also of methods of existing objects."""

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
    """Adds the CPU time of the block to ``seconds[name]``."""
    started = time.process_time()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.process_time() - started


@contextlib.contextmanager
def phases_of_methods(seconds: Seconds, methods: Sequence[tuple[object, str, str]]) -> Iterator[None]:
    """Within the block, adds the CPU time of the methods (object, method name, phase) to their phases; the methods must
    not call each other. An owner may also be a module or have a function as an attribute."""
    own = [vars(owner).get(method) for owner, method, _ in methods]
    for owner, method, name in methods:
        setattr(owner, method, _timed(getattr(owner, method), seconds, name))
    try:
        yield
    finally:
        for (owner, method, _), before in zip(methods, own, strict=True):
            if before is None:
                delattr(owner, method)  # Uncovers the method of the class.
            else:
                setattr(owner, method, before)


def medians(rounds: Sequence[Seconds]) -> Seconds:
    """The median of each phase over the rounds."""
    return {name: statistics.median(seconds[name] for seconds in rounds) for name in rounds[0]}


def _timed(function: Callable[..., Any], seconds: Seconds, name: str) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
        with phase(seconds, name):
            return function(*arguments, **named)

    return run
