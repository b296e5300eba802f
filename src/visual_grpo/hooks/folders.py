"""The folders of a command: what it reads is there, what it writes into belongs to it alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kedro.framework.hooks import hook_impl
from kedro.framework.project import pipelines
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline

from visual_grpo.common import files
from visual_grpo.common.errors import UserError
from visual_grpo.config import Parameters
from visual_grpo.config.pipelines import FLOW
from visual_grpo.operations.command import Command

STARTER = "base_model"
PREPARED = {"records", "data_report"}
"""Datasets that the data preparation makes."""


class InputHooks:
    """Refuses to start without the data that other pipelines make."""

    @hook_impl(tryfirst=True)
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        Command.from_run_params(run_params).set_current()
        read = sorted(name for name in pipeline.inputs() if name != "parameters" and not name.startswith("params:"))
        missing = [name for name in read if not catalog.exists(name)]
        config: Parameters = catalog.load("parameters")
        if missing == [STARTER] and pipeline.all_outputs() <= PREPARED and not config.data_is_drawn:
            catalog[STARTER] = {}  # Unused where the data are the user's own (see `prepare_records`).
        elif missing:
            raise _missing_error(missing, catalog)


APART = {"generated", "scores", "comparison", "reward_report", "negative_labels", "reproduction", "votes"}
"""Datasets that no other pipeline reads: they can be made while another command uses the output folder."""


class OutputHooks:
    """Refuses a second command in one output folder; looks at the checkpoint before the first node."""

    @hook_impl(tryfirst=True)
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Runs after the checks, which only read, and before anything is written."""
        config: Parameters = catalog.load("parameters")
        for file in sorted(set(_locks(config, pipeline.all_outputs(), catalog))):
            files.hold(file)
        if "adapters" in pipeline.all_outputs():
            from visual_grpo.training.run import check_resumable

            check_resumable(config)

    @hook_impl
    def after_pipeline_run(self, pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        if "adapters" in pipeline.all_outputs():
            from visual_grpo.training.resuming import mark_finished

            mark_finished(Path(catalog.load("parameters").tracking.checkpoints))


def _locks(config: Parameters, outputs: set[str], catalog: CatalogProtocol) -> Iterator[Path]:
    output = Path(config.output)
    for name in outputs:
        path = _path(catalog, name)
        if path is not None:
            yield path.with_name(f".{path.name}.lock") if name in APART else output / ".lock"
    checkpoints = Path(config.tracking.checkpoints)
    if "adapters" in outputs and output.resolve() not in checkpoints.resolve().parents:
        yield checkpoints.with_name(f".{checkpoints.name}.lock")


def _path(catalog: CatalogProtocol, name: str) -> Path | None:
    """Returns where a dataset is on disk; None for one in memory."""
    dataset: Any = catalog.get(name)
    described = dataset._describe() if dataset is not None else {}
    return Path(described["filepath"]) if "filepath" in described else None


def _missing_error(missing: list[str], catalog: CatalogProtocol) -> UserError:
    makers = {output: name for name in pipelines if name != "__default__" for output in pipelines[name].all_outputs()}
    named = sorted({makers[name] for name in missing if name in makers}, key=[*FLOW, *pipelines].index)
    lines = [
        f"  {name} ({_path(catalog, name)}), made by {makers.get(name, 'nothing in this project')}" for name in missing
    ]
    return UserError("\n".join(["Inputs of this pipeline are missing:", *lines]), remedy=",".join(named) or None)
