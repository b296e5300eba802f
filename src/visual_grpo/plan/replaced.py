"""Functions in whose place others run for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """``by`` makes of the function called ``name`` the one that takes its place in ``owner``, a module or object."""
    own = vars(owner).get(name)
    setattr(owner, name, by(getattr(owner, name)))
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
