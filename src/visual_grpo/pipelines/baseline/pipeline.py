"""The baseline pipeline: prepared records and the base model in, scored images out."""

from __future__ import annotations

from kedro.pipeline import Pipeline, node, pipeline

from visual_grpo.pipelines.baseline.nodes import draw_baseline


def create_pipeline(**kwargs: object) -> Pipeline:
    return pipeline(
        [
            node(
                draw_baseline,
                inputs=["parameters", "starter_report", "records", "baseline_draft"],
                outputs="baseline",
                name="draw_baseline",
                tags="baseline",
            )
        ]
    )
