"""parameters -> reproduction."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Pipeline, node, pipeline

from visual_grpo.pipelines.reproduce.nodes import reproduce_training, require_match


def create_pipeline(**_: Any) -> Pipeline:
    return pipeline(
        [
            node(reproduce_training, inputs="parameters", outputs="reproduction", name="reproduce_training"),
            # Apart, so that the report is saved before it ends the command.
            node(require_match, inputs="reproduction", outputs=None, name="require_match"),
        ]
    )
