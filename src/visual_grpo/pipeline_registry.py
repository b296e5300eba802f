"""The project's pipelines: each is a file of `visual_grpo.pipelines` with a function ``create_pipeline``."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from kedro.pipeline import Pipeline

from visual_grpo import pipelines
from visual_grpo.config.pipelines import DATA_FLOW

NAMES = tuple(dict.fromkeys([*DATA_FLOW, *(file.name for file in pkgutil.iter_modules(pipelines.__path__))]))


def register_pipelines() -> dict[str, Pipeline]:
    """Returns each pipeline by name, and `DATA_FLOW` as one pipeline, ``__default__``."""
    files = {name: (name,) for name in NAMES} | {"__default__": DATA_FLOW}
    return {name: _Lazy(*own) for name, own in files.items()}


class _Lazy(Pipeline):
    """The pipelines of some files, which are imported when it is first looked into.

    Their nodes need torch, models and MLflow; ``kedro registry list`` needs none of it and takes a second. Kedro's
    `find_pipelines` imports one pipeline for ``run`` and ``registry describe``, but all of them for that list.
    """

    def __init__(self, *files: str) -> None:
        self._files = files

    def __getattr__(self, attribute: str) -> Any:
        """Called for what `Pipeline.__init__` would have set."""
        if "_files" not in vars(self):
            raise AttributeError(attribute)
        made = (_create(file) for file in vars(self).pop("_files"))
        vars(self).update(vars(sum(made, start=Pipeline([]))))
        return getattr(self, attribute)


def _create(file: str) -> Pipeline:
    """Creates a file's pipeline, whose name is the namespace of its nodes: Kedro-Viz shows it as one box."""
    nodes = importlib.import_module(f"{pipelines.__name__}.{file}").create_pipeline()
    return Pipeline(nodes, namespace=file, prefix_datasets_with_namespace=False)
