"""parameters -> rollback_result."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Pipeline, node, pipeline

from visual_grpo.pipelines.rollback.nodes import roll_back


def create_pipeline(**_: Any) -> Pipeline:
    return pipeline(
        [node(roll_back, inputs="parameters", outputs="rollback_result", name="roll_back", tags="rollback")]
    )
