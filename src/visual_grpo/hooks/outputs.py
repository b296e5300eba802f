"""What a command writes into belongs to it alone, and the checkpoint that it goes on from is intact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline

from visual_grpo import console, files
from visual_grpo.config import Parameters

APART = {"generated", "scores", "comparison", "reward_report", "negative_labels", "reproduction", "votes"}
"""Datasets that no other pipeline reads: they can be made while another command uses the output folder."""


class OutputHooks:
    """Refuses a second command in one output folder; looks at the checkpoint before the first node."""

    @hook_impl(tryfirst=True)
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """After the checks, which only read, and before anything is written."""
        config: Parameters = catalog.load("parameters")
        for file in sorted(set(_locks(config, pipeline.all_outputs(), catalog))):
            files.hold(file)
        if "adapters" in pipeline.all_outputs():
            from visual_grpo.training import check_resumable

            check_resumable(config, console.note)

    @hook_impl
    def after_pipeline_run(self, pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        if "adapters" in pipeline.all_outputs():
            from visual_grpo.same_training import mark_finished

            mark_finished(Path(catalog.load("parameters").tracking.checkpoints))


def _locks(config: Parameters, outputs: set[str], catalog: CatalogProtocol) -> Iterator[Path]:
    """The files to lock."""
    output = Path(config.output)
    for name in outputs:
        path = _path(name, catalog)
        if path is not None:
            yield path.with_name(f".{path.name}.lock") if name in APART else output / ".lock"
    checkpoints = Path(config.tracking.checkpoints)
    if "adapters" in outputs and output.resolve() not in checkpoints.resolve().parents:
        yield checkpoints.with_name(f".{checkpoints.name}.lock")


def _path(name: str, catalog: CatalogProtocol) -> Path | None:
    """Where a dataset is on disk; None for one in memory."""
    dataset: Any = catalog.get(name)
    described = dataset._describe() if dataset is not None else {}
    return Path(described["filepath"]) if "filepath" in described else None
