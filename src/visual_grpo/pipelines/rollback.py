"""Puts the alias of the champion back."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from visual_grpo.common import console
from visual_grpo.config import PromotionConfig
from visual_grpo.tracking.registry import Registry


def create_pipeline() -> Pipeline:
    return Pipeline([Node(roll_back, ["params:promotion", "params:output"], "rollback_result", name="roll_back")])


def roll_back(settings: PromotionConfig, output: str) -> dict[str, Any]:
    """Puts the alias back on the version promoted before the champion; returns both versions."""
    registry = Registry.of(settings, output)
    before, after = registry.rollback()
    console.note(f"models:/{registry.name}@{registry.alias} is version {after} again, as before version {before}.")
    return {"model": registry.name, "alias": registry.alias, "from": before, "to": after}
