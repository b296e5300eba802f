"""parameters -> generated."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Pipeline, node, pipeline

from visual_grpo.pipelines.generate.nodes import draw_prompts


def create_pipeline(**_: Any) -> Pipeline:
    return pipeline(
        [
            node(
                draw_prompts,
                inputs=["parameters", "generated_draft"],
                outputs="generated",
                name="draw_prompts",
                tags="generate",
            )
        ]
    )
