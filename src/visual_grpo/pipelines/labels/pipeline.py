"""params:seed, params:data, params:rewards, records -> negative_labels."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Pipeline, node, pipeline

from visual_grpo.pipelines.labels.nodes import label_records


def create_pipeline(**_: Any) -> Pipeline:
    return pipeline(
        [
            node(
                label_records,
                inputs=["params:seed", "params:data", "params:rewards", "records", "negative_labels_draft"],
                outputs="negative_labels",
                name="label_records",
                tags="labels",
            )
        ]
    )
