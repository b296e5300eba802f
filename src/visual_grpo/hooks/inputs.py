"""Inputs that other pipelines make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kedro.framework.hooks import hook_impl
from kedro.framework.project import pipelines
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline

from visual_grpo.command import Command
from visual_grpo.config import Parameters
from visual_grpo.config.outputs import FLOW
from visual_grpo.errors import UserError

STARTER = "starter_report"
PREPARED = {"records", "data_report"}
"""What the data preparation makes."""


class InputHooks:
    """Refuses to start without the data that other pipelines make."""

    @hook_impl(tryfirst=True)
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        Command.of(run_params).begins()
        missing = [name for name in sorted(pipeline.inputs()) if not _is_there(catalog, name)]
        config: Parameters = catalog.load("parameters")
        if missing == [STARTER] and pipeline.all_outputs() <= PREPARED and not config.data_is_drawn:
            catalog[STARTER] = {}  # It only says that the default dataset has been drawn.
        elif missing:
            raise UserError(_missing_message(missing, catalog))


def _is_there(catalog: CatalogProtocol, name: str) -> bool:
    if name == "parameters" or name.startswith("params:"):
        return True
    return bool(catalog.exists(name))


def _missing_message(missing: list[str], catalog: CatalogProtocol) -> str:
    makers = {output: name for name in pipelines if name != "__default__" for output in pipelines[name].all_outputs()}
    order = list(pipelines)
    named = sorted({makers[name] for name in missing if name in makers}, key=lambda name: _position(name, order))
    lines = [
        f"  {name}{_path(catalog, name)}, made by {makers.get(name, 'nothing in this project')}" for name in missing
    ]
    commands = [str(Command.now().of_pipeline(name)) for name in named]
    return "\n".join(["Inputs of this pipeline are missing:", *lines, "Run first:", *commands])


def _position(name: str, others: Sequence[str]) -> int:
    return FLOW.index(name) if name in FLOW else len(FLOW) + others.index(name)


def _path(catalog: CatalogProtocol, name: str) -> str:
    dataset = catalog.get(name)
    described = dataset._describe() if dataset is not None else {}
    return f" ({described['filepath']})" if "filepath" in described else ""
