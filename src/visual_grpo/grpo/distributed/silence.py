"""Notes of rank 0 while it waits for the other ranks: one may be stopped, or hang."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

FIRST = 60.0
"""Seconds of a wait after which the user is told; the user is told again after twice as many, and so on."""
_began: float | None = None
log = logging.getLogger(__name__)


@contextmanager
def waiting() -> Iterator[None]:
    """Marks the block as a wait for other ranks."""
    global _began
    _began = time.monotonic()
    try:
        yield
    finally:
        _began = None


def tell(limit: timedelta) -> NoReturn:
    """Tells of each long wait, for as long as the process lives; ``limit`` is when a wait is given up."""
    due = FIRST
    while True:
        time.sleep(min(1.0, FIRST))
        waited = 0.0 if (began := _began) is None else time.monotonic() - began
        if waited < FIRST:
            due = FIRST
        elif waited >= due:
            log.warning(
                "Other processes of this command have not answered for %.0f s. They may be computing, stopped or"
                " hung; the command gives up after %.0f s.",
                waited,
                limit.total_seconds(),
            )
            due = 2 * waited
