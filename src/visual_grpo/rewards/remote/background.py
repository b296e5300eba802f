"""Asynchronous work for code that is not asynchronous, with nothing left of it afterwards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from visual_grpo.threads import in_thread

T = TypeVar("T")

_LOOK = 0.1
"""Seconds between two looks whether anybody still waits."""


def completed(work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns, run in an event loop in a thread, both of which end with it.

    A thread because the caller's may have a running loop (a notebook), and because asyncio would take Ctrl-C over. The
    work is cancelled where the caller is interrupted.
    """
    given_up = threading.Event()
    future = in_thread(lambda: asyncio.run(_while_awaited(work, given_up)), "remote-reward")
    try:
        return future.result()
    finally:
        given_up.set()


async def _while_awaited(work: Coroutine[Any, Any, T], given_up: threading.Event) -> T:
    task = asyncio.ensure_future(work)
    while not given_up.is_set():
        await asyncio.wait({task}, timeout=_LOOK)
        if task.done():
            return task.result()
    task.cancel()
    return await task
