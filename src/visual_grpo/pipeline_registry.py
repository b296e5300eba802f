"""The project's pipelines: every package in ``visual_grpo.pipelines`` with a ``create_pipeline``."""

from __future__ import annotations

from pkgutil import iter_modules

from kedro.framework.project import find_pipelines
from kedro.pipeline import Pipeline

from visual_grpo import pipelines


def register_pipelines() -> dict[str, Pipeline]:
    """Each pipeline by name, and all of them, ordered by their data, as ``__default__``."""
    names = [module.name for module in iter_modules(pipelines.__path__)]
    found = find_pipelines(raise_errors=True, pipelines_to_find=names)
    found["__default__"] = sum(found.values(), start=Pipeline([]))
    return found
