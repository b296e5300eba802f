"""The project's pipelines: which function makes which dataset from which others.

Nodes are plain functions in `visual_grpo.pipelines`, one module for each pipeline, and this table wires all of them. A
function is imported when its node runs, so that node modules import torch, models and MLflow at their top while
``kedro registry list`` takes about a second.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

from kedro.pipeline import Pipeline, node

from visual_grpo.config.pipelines import FLOW

Inputs = str | list[str]
PIPELINES: dict[str, dict[str, tuple[str, Inputs, Inputs | None]]] = {
    "starter": {
        "build_starter": (
            "starter:build",
            ["params:starter", "params:data", "params:model", "params:seed"],
            "base_model",
        ),
    },
    "data_preparation": {
        "prepare_records": (
            "data_preparation:prepare_records",
            ["params:data", "params:output", "base_model"],
            "records",
        ),
        "report_records": ("data_preparation:report_records", "records", "data_report"),
    },
    "baseline": {
        "draw_baseline": (
            "baseline:draw_baseline",
            ["parameters", "base_model", "records"],
            "baseline",
        ),
    },
    "train": {
        "train": (
            "train:train",
            ["parameters", "base_model", "records", "baseline"],
            ["adapters", "training_history"],
        ),
    },
    "evaluate": {
        "choose_adapters": ("evaluate:choose_adapters", ["parameters", "adapters"], "judged_adapters"),
        "draw_trained": (
            "evaluate:draw_trained",
            ["parameters", "base_model", "records", "baseline", "judged_adapters"],
            "trained",
        ),
        "compare_with_baseline": (
            "evaluate:compare_with_baseline",
            ["params:evaluation", "baseline", "trained", "judged_adapters"],
            ["evaluation", "result"],
        ),
        "write_report": (
            "evaluate:write_report",
            ["params:output", "evaluation", "baseline", "trained", "judged_adapters"],
            "evaluation_report",
        ),
        "show_evaluation": ("evaluate:show", ["evaluation", "evaluation_report"], None),
    },
    "compare": {
        "compare_adapters": ("compare:compare_adapters", ["parameters", "records"], "comparison"),
    },
    "generate": {"draw_prompts": ("generate:draw_prompts", ["parameters"], "generated")},
    # Two nodes, so that the report is kept before an error ends the command; so in plan and reproduce.
    "gpu_check": {
        "check_gpu": ("gpu_check:check", "parameters", "gpu_check"),
        "require_whole_check": ("gpu_check:require_complete", "gpu_check", None),
    },
    "check_model": {
        "check_model": ("check_model:check", "parameters", "model_check"),
        "require_equal": ("check_model:require_equal", "model_check", None),
    },
    "labels": {
        "label_records": (
            "labels:label_records",
            ["params:seed", "params:data", "params:rewards", "params:output", "records"],
            "negative_labels",
        ),
    },
    "plan": {
        "plan_training": ("plan:plan_training", "parameters", "plan"),
        "require_fit": ("plan:require_fit", "plan", None),
    },
    "promote": {
        "judge_candidate": (
            "promote:judge",
            ["parameters", "records"],
            ["promotion", "judgement"],
        ),
        "promote_candidate": (
            "promote:promote",
            ["parameters", "promotion", "judgement"],
            "promotion_result",
        ),
    },
    "reproduce": {
        "reproduce_training": ("reproduce:reproduce_training", "parameters", "reproduction"),
        "require_match": ("reproduce:require_match", "reproduction", None),
    },
    "reward_report": {
        "report_rewards": (
            "reward_report:report_rewards",
            ["parameters", "base_model", "records"],
            "reward_report",
        ),
    },
    "rollback": {"roll_back": ("promote:roll_back", "parameters", "rollback_result")},
    "score": {"score_folder": ("score:score_folder", ["parameters"], "scores")},
    "vote": {"collect_votes": ("vote:collect_votes", ["parameters", "records"], "votes")},
}
"""Pipeline -> node -> (function in `visual_grpo.pipelines`, inputs, outputs)."""


def create_pipeline(name: str) -> Pipeline:
    """Builds a pipeline of `PIPELINES`; its name is the namespace of its nodes, which Kedro-Viz shows as one box."""
    return Pipeline(
        [
            node(_lazy(function), inputs, outputs, name=node_name, namespace=name)
            for node_name, (function, inputs, outputs) in PIPELINES[name].items()
        ]
    )


def register_pipelines() -> dict[str, Pipeline]:
    """Returns each pipeline by name, and those of `FLOW` together as ``__default__``."""
    pipelines = {name: create_pipeline(name) for name in PIPELINES}
    return pipelines | {"__default__": sum((pipelines[name] for name in FLOW), start=Pipeline([]))}


def _lazy(function: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return pkgutil.resolve_name(f"visual_grpo.pipelines.{function}")(*args)

    call.__name__ = function.rpartition(":")[2]
    return call
