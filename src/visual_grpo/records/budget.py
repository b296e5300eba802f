"""Bounds what several threads hold at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition


class Budget:
    """An amount that threads take from and give back; who wants more than is left waits.

    Args:
        most: all there is; who wants more gets all of it.
    """

    def __init__(self, most: int) -> None:
        self._most = self._left = most
        self._changed = Condition()

    @contextmanager
    def taken(self, amount: int) -> Iterator[None]:
        """Takes an amount for the block. One inside another of the same budget could wait for ever."""
        amount = min(amount, self._most)
        with self._changed:
            self._changed.wait_for(lambda: self._left >= amount)
            self._left -= amount
        try:
            yield
        finally:
            with self._changed:
                self._left += amount
                self._changed.notify_all()
