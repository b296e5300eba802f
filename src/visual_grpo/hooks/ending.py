"""Prints a command's steps and its end, and frees memory between nodes."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol, MemoryDataset
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node

from visual_grpo.common import console
from visual_grpo.config.pipelines import FLOW
from visual_grpo.evaluation import verdict
from visual_grpo.operations.command import Command, is_stage_of_dvc
from visual_grpo.tracking.tracker import Tracker

SHOWN = {
    "data_report": "data report",
    "baseline": "base model's samples",
    "adapters": "adapter",
    "trained": "trained model's samples",
    "negative_labels": "labels",
    "generated": "pictures",
    "scores": "scores",
    "reward_report": "report",
    "votes": "votes",
    "promotion_result": "decision",
    "reproduction": "report",
    "plan": "plan",
    "gpu_check": "check",
    "model_check": "check",
}
"""Dataset -> what its path is called at the end."""
REPORT = "evaluation.html"
OPENED = {
    "evaluation_report": REPORT,
    "comparison": REPORT,
    "promotion": REPORT,
    "generated": "contact_sheet.png",
    "scores": "sheet.png",
    "reward_report": "sheet.png",
}
"""Dataset -> the file in its folder to look at first; a promotion that compares nothing has none."""
LAST_OUTPUTS = {"base_model": 0, "records": 1, "baseline": 2, "adapters": 3, "trained": 4}
"""Dataset -> the position of its pipeline in `FLOW`."""


class EndingHooks:
    """Prints headings that count the steps, and at the end where the results are and what to run next."""

    @hook_impl
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline) -> None:
        self._steps, self._step = len(pipeline.nodes), 0

    @hook_impl
    def before_node_run(self, node: Node) -> None:
        self._step += 1
        console.heading(f"{self._step} of {self._steps}: {node.short_name}")

    @hook_impl
    def after_node_run(self) -> None:
        """Collects errors that a library keeps: their frames refer to the model, and the next node loads its own."""
        gc.collect()

    @hook_impl(tryfirst=True)
    def after_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Runs before MLflow's run is closed, since its name is shown."""
        made = pipeline.all_outputs()
        where = {label: _path(catalog, name) for name, label in SHOWN.items() if name in made}
        files = [Path.cwd() / _path(catalog, name) / file for name, file in OPENED.items() if name in made]
        opened = next(filter(Path.is_file, files), None)
        after = None if is_stage_of_dvc() else _next(run_params, made, catalog, opened)
        if opened is not None and after is None:
            where["open"] = opened.as_uri()  # A terminal follows the link.
        name = Tracker.active().name()
        console.summary("", where | ({"MLflow run": name} if name else {}))
        if opened is not None and opened.name == REPORT and "promotion" not in made:  # It has said its decision.
            verdict.show(json.loads(opened.with_suffix(".json").read_text(encoding="utf-8"))["headline"])
        if after is not None:
            console.note(f"Next: {after}")  # One line, however long: it is pasted.


def _next(run_params: dict[str, Any], made: set[str], catalog: CatalogProtocol, report: Path | None) -> str | None:
    done = [step for name, step in LAST_OUTPUTS.items() if name in made]
    if not done:
        return None
    if max(done) == len(FLOW) - 1:
        return "make ui" if report is None else f"open {report.as_uri()} (make ui shows all runs)"
    command = Command.from_run_params(run_params).without("resume")
    # A baseline for an earlier adapter is drawn to judge it, not to train another.
    judges = "adapter" in command.parameters
    following = len(FLOW) - 1 if judges else max(done) + 1
    lacking = [
        FLOW[step]
        for name, step in LAST_OUTPUTS.items()
        if step < following and not (judges and name == "adapters") and not _is_on_disk(catalog, name)
    ]
    return str(command.for_pipeline(",".join([*lacking, FLOW[following]])))


def _is_on_disk(catalog: CatalogProtocol, name: str) -> bool:
    """Tells a file from the empty report in memory that `InputHooks` gives a preparation of a user's data."""
    return bool(catalog.exists(name)) and not isinstance(catalog.get(name), MemoryDataset)


def _path(catalog: CatalogProtocol, name: str) -> str:
    dataset: Any = catalog.get(name)
    path = Path(dataset._describe()["filepath"])
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
