"""Repeats a training from its commit, data and parameters, and compares; on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kedro.pipeline import Node, Pipeline

from visual_grpo.adapter_folder import START_RUN, read_facts
from visual_grpo.common import console
from visual_grpo.common.errors import UserError
from visual_grpo.config import Parameters
from visual_grpo.operations.reproduction.repeat import repeat, require_own
from visual_grpo.tracking.adapter_lookup import find_adapters, find_start
from visual_grpo.tracking.run_context import RunContext


def create_pipeline() -> Pipeline:
    return Pipeline(
        [
            Node(
                reproduce_training,
                ["parameters", "params:run_context", "path:adapters"],
                "reproduction",
                name="reproduce_training",
            ),
            Node(require_match, "reproduction", None, name="require_match"),
        ],
        tags=["apart"],
    )


def reproduce_training(parameters: Parameters, context: RunContext, latest: Path) -> dict[str, Any]:
    """Repeats the training that ``run`` names: see `visual_grpo.operations.reproduction.repeat.repeat`."""
    if parameters.run is None:
        raise UserError(
            "reproduce: name the training with run=ID: the id or name of an MLflow run, a folder of adapters, or"
            " latest (what the train pipeline left in this output folder)"
        )
    try:
        adapters, start = find_adapters(parameters.run, latest), None
    except UserError as error:
        raise UserError(f"run: {error}", error.remedy) from error
    facts = read_facts(adapters)
    require_own(adapters, facts, context.project, parameters)
    if "start" in facts:
        named = facts["parameters"]["train"]["start"]
        start = find_start(named, facts["start"], latest, facts.get(START_RUN))
    report = repeat(adapters, parameters.reproduce, context.project, start)
    rows = [[row["what"], row["run"], row["here"], row["result"]] for row in report["rows"]]
    console.table("What matched", ["", "run", "here", ""], rows)
    console.note(f"{report['sentence']} ({report['seconds']} s)")
    return report


def require_match(reproduction: dict[str, Any]) -> None:
    if not reproduction["matches"]:
        raise UserError(str(reproduction["sentence"]))
