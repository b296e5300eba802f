"""Work in a thread that ends with it, and that the process does not wait for when it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Starts ``work``; its result or error is the future's.

    The threads of a pool would be joined when the interpreter ends: a run that was interrupted, or that another error
    ended, would wait for the answers of a server.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # Raised again by the future.
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
