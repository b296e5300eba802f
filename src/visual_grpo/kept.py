"""A few values that are costly to make, the ones used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Kept(Generic[K, V]):
    """At most ``size`` values."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of ``key``, made if it is not there."""
        if key not in self._values:
            self._values[key] = make()
            while len(self._values) > self.size:
                self._values.popitem(last=False)
        self._values.move_to_end(key)
        return self._values[key]
