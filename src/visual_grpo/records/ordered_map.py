"""Maps a function over a stream with several threads, in order and with a bounded number of pending items."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

_AHEAD = 4
"""Pending items per thread, so that threads stay busy while a slow item is computed."""


def ordered_map(function: Callable[[A], B], items: Iterable[A], threads: int) -> Iterator[B]:
    """Yields ``function(item)`` in the order of the items; at most 4 items per thread are pending."""
    pending: deque[Future[B]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) >= _AHEAD * threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
