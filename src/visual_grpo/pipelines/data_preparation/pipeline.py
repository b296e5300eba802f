"""params:data, starter_report -> records, data_report."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Pipeline, node, pipeline

from visual_grpo.pipelines.data_preparation.nodes import prepare_records, report_records


def create_pipeline(**_: Any) -> Pipeline:
    return pipeline(
        [
            node(
                prepare_records,
                inputs=["params:data", "starter_report", "records_draft"],
                outputs="records",
                name="prepare_records",
            ),
            node(report_records, "records", "data_report", name="report_records"),
        ]
    )
