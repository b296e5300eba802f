"""The train pipeline: one node, since a training run is one process with one checkpoint."""

from __future__ import annotations

from kedro.pipeline import Pipeline, node, pipeline

from visual_grpo.pipelines.train.nodes import train


def create_pipeline(**kwargs: object) -> Pipeline:
    return pipeline(
        [
            node(
                train,
                inputs=["parameters", "starter_report", "records", "baseline", "adapters_draft"],
                outputs=["adapters", "training_history"],
                name="train",
                tags="train",
            )
        ]
    )
