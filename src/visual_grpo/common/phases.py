"""Marks the phases of a step, and work that repeats itself, for whoever watches: a plan, a check of a GPU, a bar.

Where nobody watches, the marks do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

from torch import Tensor
from torch.utils._pytree import tree_leaves

T = TypeVar("T")
R = TypeVar("R")


class Watcher:
    """Is told about phases; a subclass that counts operations also shortens what repeats itself."""

    shortens = False
    """Repeated work runs once or twice, and is counted for all."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Assigns what happens inside to ``name`` alone, also within another phase."""
        return nullcontext()

    def weighted(self, factor: float) -> AbstractContextManager[None]:
        """Counts what happens inside ``factor`` times."""
        return nullcontext()

    def captured(self) -> AbstractContextManager[None]:
        """Counts what happens inside as run by a CUDA graph."""
        return nullcontext()

    def begins(self, number: int, total: int) -> None:
        """Is told before each item of repeated work, from 1."""


W = TypeVar("W", bound=Watcher)
_watcher: Watcher | None = None


@contextmanager
def watched_by(watcher: W) -> Iterator[W]:
    """Tells ``watcher`` about all marks inside, also of other threads."""
    global _watcher
    before, _watcher = _watcher, watcher
    try:
        yield watcher
    finally:
        _watcher = before


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Marks a phase: around a block, or around a function as its decorator."""
    with _watcher.phase(name) if _watcher else nullcontext():
        yield


def captured() -> AbstractContextManager[None]:
    """Marks what a CUDA graph would run."""
    return _watcher.captured() if _watcher else nullcontext()


def alike(items: Sequence[T]) -> Iterator[T]:
    """Yields ``items``. All but the first need the same work: a plan does the work of the first two."""
    watcher = _watcher
    if watcher is None or not watcher.shortens or len(items) < 3:
        for number, item in enumerate(items, 1):
            if watcher is not None:
                watcher.begins(number, len(items))
            yield item
        return
    yield items[0]
    with watcher.weighted(len(items) - 1):
        yield items[1]


def map_alike(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Applies ``function`` to each item. The work of all but the last is alike: a plan does that of one, and takes its
    result for all; of the last too, if that is smaller."""
    if _watcher is None or not _watcher.shortens or len(items) < 2:
        return [function(item) for item in items]
    *others, last = items
    alike = _shapes(items[0]) == _shapes(last)
    with _watcher.weighted(len(others) + alike):
        result = function(items[0])
    return [result] * len(others) + [result if alike else function(last)]


def _shapes(item: object) -> list[object]:
    return [leaf.shape for leaf in tree_leaves(item) if isinstance(leaf, Tensor)]
