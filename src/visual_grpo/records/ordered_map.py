"""A function over a stream, by several threads, in order and with few items under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

_AHEAD = 4
"""Items read ahead for each thread, so that none waits while a slow one is done."""


def ordered_map(function: Callable[[A], B], items: Iterable[A], threads: int) -> Iterator[B]:
    """Yields ``function(item)`` in the order of the items; at most 4 items a thread are under way."""
    under_way: deque[Future[B]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                under_way.append(pool.submit(function, item))
                if len(under_way) >= _AHEAD * threads:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
