"""parameters, records -> promotion (the report), promotion_result."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Pipeline, node, pipeline

from visual_grpo.pipelines.promote.nodes import judge, promote


def create_pipeline(**_: Any) -> Pipeline:
    return pipeline(
        [
            node(
                judge,
                inputs=["parameters", "records", "promotion_draft"],
                outputs=["promotion", "judgement"],
                name="judge_candidate",
            ),
            node(
                promote,
                inputs=["parameters", "promotion", "judgement"],
                outputs="promotion_result",
                name="promote_candidate",
            ),
        ],
        tags="promote",
    )
