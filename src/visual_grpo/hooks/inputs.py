"""Inputs that other pipelines make."""

from __future__ import annotations

from typing import Any

from kedro.framework.hooks import hook_impl
from kedro.framework.project import pipelines
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline

from visual_grpo.errors import UserError


class InputHooks:
    """Refuses to start without the data that other pipelines make."""

    @hook_impl(tryfirst=True)
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        missing = [name for name in sorted(pipeline.inputs()) if not _is_there(catalog, name)]
        if missing:
            raise UserError(_missing_message(missing, catalog))


def _is_there(catalog: CatalogProtocol, name: str) -> bool:
    if name == "parameters" or name.startswith("params:"):
        return True
    return bool(catalog.exists(name))


def _missing_message(missing: list[str], catalog: CatalogProtocol) -> str:
    pipelines.set_requested(None)
    makers = {output: name for name in pipelines if name != "__default__" for output in pipelines[name].all_outputs()}
    lines = []
    for name in missing:
        command = f".venv/bin/kedro run --pipeline={makers[name]}" if name in makers else "nothing in this project"
        lines.append(f"  {name}{_path(catalog, name)}, made by: {command}")
    return "Inputs of this pipeline are missing:\n" + "\n".join(lines)


def _path(catalog: CatalogProtocol, name: str) -> str:
    dataset = catalog.get(name)
    described = dataset._describe() if dataset is not None else {}
    return f" ({described['filepath']})" if "filepath" in described else ""
