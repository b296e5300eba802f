"""The project's pipelines: every package in ``visual_grpo.pipelines`` with a ``create_pipeline``."""

from __future__ import annotations

from pkgutil import iter_modules

from kedro.framework.project import find_pipelines
from kedro.pipeline import Pipeline

from visual_grpo import pipelines

ON_DEMAND = {
    "compare",
    "generate",
    "gpu_check",
    "labels",
    "plan",
    "promote",
    "reproduce",
    "reward_report",
    "rollback",
    "score",
    "vote",
}
"""Run by name only: nothing depends on what they leave."""


def register_pipelines() -> dict[str, Pipeline]:
    """Each pipeline by name, and all but those on demand, ordered by their data, as ``__default__``.

    There every node has its pipeline's name as a tag, by which other tools can group them.
    """
    names = [module.name for module in iter_modules(pipelines.__path__)]
    found = find_pipelines(raise_errors=True, pipelines_to_find=names)
    flow = (Pipeline(pipeline, tags=name) for name, pipeline in found.items() if name not in ON_DEMAND)
    found["__default__"] = sum(flow, start=Pipeline([]))
    return found
