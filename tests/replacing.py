"""Replaces a function for a while: where tests stand in for a device, or watch what runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch


def replaced(owner: Any, name: str, by: Callable[[Callable[..., Any]], Any]) -> AbstractContextManager[Any]:
    """Puts ``by(owner.name)`` in the place of ``owner.name`` for a while."""
    return patch.object(owner, name, by(getattr(owner, name)))
