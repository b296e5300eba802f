"""params:starter, params:data, params:model, params:seed -> starter_report."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Pipeline, node, pipeline

from visual_grpo.pipelines.starter.nodes import build


def create_pipeline(**_: Any) -> Pipeline:
    return pipeline(
        [
            node(
                build,
                inputs=["params:starter", "params:data", "params:model", "params:seed"],
                outputs="starter_report",
                name="build_starter",
                tags="starter",
            )
        ]
    )
