"""parameters -> scores."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Pipeline, node, pipeline

from visual_grpo.pipelines.score.nodes import score_folder


def create_pipeline(**_: Any) -> Pipeline:
    return pipeline(
        [node(score_folder, inputs=["parameters", "scores_draft"], outputs="scores", name="score_folder", tags="score")]
    )
