"""parameters, records -> comparison."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Pipeline, node, pipeline

from visual_grpo.pipelines.compare.nodes import compare_adapters


def create_pipeline(**_: Any) -> Pipeline:
    return pipeline(
        [
            node(
                compare_adapters,
                inputs=["parameters", "records", "comparison_draft"],
                outputs="comparison",
                name="compare_adapters",
                tags="compare",
            )
        ]
    )
