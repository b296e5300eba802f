"""parameters, starter_report, records -> reward_report."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Pipeline, node, pipeline

from visual_grpo.pipelines.reward_report.nodes import report_rewards


def create_pipeline(**_: Any) -> Pipeline:
    return pipeline(
        [
            node(
                report_rewards,
                inputs=["parameters", "starter_report", "records", "reward_report_draft"],
                outputs="reward_report",
                name="report_rewards",
                tags="reward_report",
            )
        ]
    )
