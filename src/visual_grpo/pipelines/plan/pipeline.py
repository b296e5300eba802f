"""parameters -> plan."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Pipeline, node, pipeline

from visual_grpo.pipelines.plan.nodes import plan_training, require_fit


def create_pipeline(**_: Any) -> Pipeline:
    return pipeline(
        [
            node(plan_training, inputs="parameters", outputs="plan", name="plan_training"),
            # Apart, so that the plan is saved before it ends the command.
            node(require_fit, inputs="plan", outputs=None, name="require_fit"),
        ]
    )
