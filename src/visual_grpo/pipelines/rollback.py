"""Puts the alias back on the version that the champion replaced; on request."""

from __future__ import annotations

from typing import Any

from visual_grpo import console
from visual_grpo.config import Parameters
from visual_grpo.tracking.registry import Registry


def roll_back(parameters: Parameters) -> dict[str, Any]:
    """Returns the champion's version before and after."""
    registry = Registry.of(parameters)
    before, after = registry.rollback()
    console.note(f"models:/{registry.name}@{registry.alias} is version {after} again, as before version {before}.")
    return {"model": registry.name, "alias": registry.alias, "from": before, "to": after}
