"""parameters, records -> votes."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Pipeline, node, pipeline

from visual_grpo.pipelines.vote.nodes import collect_votes


def create_pipeline(**_: Any) -> Pipeline:
    return pipeline(
        [
            node(
                collect_votes,
                inputs=["parameters", "records", "votes_draft"],
                outputs="votes",
                name="collect_votes",
                tags="vote",
            )
        ]
    )
