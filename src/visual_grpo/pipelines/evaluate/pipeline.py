"""The evaluate pipeline: draw the trained policy's images, compare, report, show."""

from __future__ import annotations

from kedro.pipeline import Pipeline, node, pipeline

from visual_grpo.pipelines.evaluate.nodes import (
    choose_adapters,
    compare_with_baseline,
    draw_trained,
    show,
    write_report,
)


def create_pipeline(**kwargs: object) -> Pipeline:
    return pipeline(
        [
            node(
                choose_adapters,
                inputs=["parameters", "adapters"],
                outputs="judged_adapters",
                name="choose_adapters",
            ),
            node(
                draw_trained,
                inputs=["parameters", "starter_report", "records", "baseline", "judged_adapters", "trained_draft"],
                outputs="trained",
                name="draw_trained",
            ),
            node(
                compare_with_baseline,
                inputs=["params:evaluation", "baseline", "trained", "judged_adapters"],
                outputs=["evaluation", "result"],
                name="compare_with_baseline",
            ),
            node(
                write_report,
                inputs=["evaluation", "baseline", "trained", "judged_adapters", "evaluation_report_draft"],
                outputs="evaluation_report",
                name="write_report",
            ),
            node(
                show,
                inputs=["evaluation", "evaluation_report"],
                outputs=None,
                name="show_evaluation",
            ),
        ],
        tags="evaluate",
    )
