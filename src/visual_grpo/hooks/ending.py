"""Prints a command's steps and its end, and frees memory between nodes."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol, MemoryDataset
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node

from visual_grpo.common import console
from visual_grpo.common.files import from_here
from visual_grpo.config.pipelines import DATA_FLOW
from visual_grpo.data.datasets import path_of
from visual_grpo.evaluation import verdict
from visual_grpo.hooks.inputs_and_outputs import about
from visual_grpo.operations.command import APART, Command, is_stage_of_dvc
from visual_grpo.tracking.tracker import Tracker

REPORT = "evaluation.html"


class EndingHooks:
    """Prints headings that count the steps, and at the end where the results are and what to run next."""

    @hook_impl
    def before_pipeline_run(self, pipeline: Pipeline) -> None:
        self._steps, self._step = len(pipeline.nodes), 0

    @hook_impl
    def before_node_run(self, node: Node) -> None:
        self._step += 1
        console.heading(f"{self._step} of {self._steps}: {node.short_name}")

    @hook_impl
    def after_node_run(self) -> None:
        """Frees errors that a library keeps: their frames refer to the model, and the next node loads its own."""
        gc.collect()

    @hook_impl(tryfirst=True)
    def after_pipeline_run(self, pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Runs before MLflow's run is closed, since its name is shown."""
        if APART in os.environ:
            return
        made = {name: about(catalog, name) for name in catalog if name in pipeline.all_outputs()}
        paths = {name: path for name in made if (path := path_of(catalog, name)) is not None}
        where = {entry["label"]: str(from_here(paths[name])) for name, entry in made.items() if "label" in entry}
        files = [Path.cwd() / paths[name] / entry["opened"] for name, entry in made.items() if "opened" in entry]
        opened = next(filter(Path.is_file, files), None)
        after = None if is_stage_of_dvc() else _next(made, catalog, opened)
        if opened is not None and after is None:
            where["open"] = opened.as_uri()  # A terminal follows the link.
        name = Tracker.active().name()
        console.summary("", where | ({"MLflow run": name} if name else {}))
        if opened is not None and opened.name == REPORT and "promotion" not in made:  # It has said its decision.
            verdict.show(json.loads(opened.with_suffix(".json").read_text(encoding="utf-8"))["headline"])
        if after is not None:
            console.note(f"Next: {after}")  # One line, however long: it is pasted.


def _next(made: Mapping[str, Mapping[str, Any]], catalog: CatalogProtocol, report: Path | None) -> str | None:
    """Returns the command of the next pipeline of the data flow, with those before it whose results are not there."""
    done = [DATA_FLOW.index(entry["made_by"]) for entry in made.values() if entry.get("made_by") in DATA_FLOW]
    if not done:
        return None
    if max(done) == len(DATA_FLOW) - 1:
        return "make ui" if report is None else f"open {report.as_uri()} (make ui shows all runs)"
    command = Command.current().without("resume")
    # A baseline for an earlier adapter is generated to judge it, not to train a new one.
    judges = "adapter" in command.parameters
    following = len(DATA_FLOW) - 1 if judges else max(done) + 1
    lacking = {
        maker
        for name in catalog
        if (maker := about(catalog, name).get("made_by")) in DATA_FLOW[:following]
        and not (judges and maker == "train")
        and not _is_on_disk(catalog, name)
    }
    names = ",".join([*filter(lacking.__contains__, DATA_FLOW), DATA_FLOW[following]])
    return str(command.for_pipeline(names))


def _is_on_disk(catalog: CatalogProtocol, name: str) -> bool:
    """Tells a file from the empty report in memory that `InputHooks` gives a preparation of a user's data."""
    return bool(catalog.exists(name)) and not isinstance(catalog.get(name), MemoryDataset)
