"""parameters -> gpu_check."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Pipeline, node, pipeline

from visual_grpo.pipelines.gpu_check.nodes import check, require_whole


def create_pipeline(**_: Any) -> Pipeline:
    return pipeline(
        [
            node(check, inputs=["parameters", "gpu_check_draft"], outputs="gpu_check", name="check_gpu"),
            # Apart, so that the report is kept before an error ends the command.
            node(require_whole, inputs="gpu_check", outputs=None, name="require_whole_check"),
        ]
    )
