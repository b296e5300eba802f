"""The folders of a command: what it reads is there, what it writes into belongs to it alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kedro.framework.hooks import hook_impl
from kedro.framework.project import pipelines
from kedro.io import CatalogProtocol, MemoryDataset
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node

from visual_grpo.common import files
from visual_grpo.common.errors import UserError
from visual_grpo.config import Parameters
from visual_grpo.config.pipelines import DATA_FLOW
from visual_grpo.data.datasets import PATH, FolderDataset, RecordsDataset, path_of, require_path
from visual_grpo.operations.command import Command


class InputHooks:
    """Refuses to start without the data that other pipelines make."""

    @hook_impl(tryfirst=True)
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        Command.from_run_params(run_params).set_current()
        read = sorted(name for name in pipeline.inputs() if name != "parameters" and not name.startswith("params:"))
        missing = [name for name in read if not catalog.exists(name)]
        config: Parameters = catalog.load("parameters")
        makers = {about(catalog, name).get("made_by") for name in pipeline.all_outputs()}
        if missing == ["base_model"] and makers == {"data_preparation"} and not config.data_is_rendered:
            # Unused where the data are the user's own (see `prepare_records`).
            catalog["base_model"] = MemoryDataset({}, metadata=dict(about(catalog, "base_model")))
        elif missing:
            raise _missing_error(missing, catalog)


class OutputHooks:
    """Refuses a second command in one output folder, gives nodes their places and drafts, notes a training's end."""

    @hook_impl(tryfirst=True)
    def before_pipeline_run(self, pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Runs after the checks, which only read, and before anything is written."""
        config: Parameters = catalog.load("parameters")
        for file in sorted(set(_locks(Path(config.output), Path(config.tracking.checkpoints), pipeline, catalog))):
            files.hold(file)

    @hook_impl
    def before_node_run(self, node: Node, catalog: CatalogProtocol, inputs: dict[str, Any]) -> dict[str, Path]:
        """Gives the node its paths: of datasets, and the ``draft`` of its first output that has one."""
        paths = {name: require_path(catalog, name.removeprefix(PATH)) for name in inputs if name.startswith(PATH)}
        if "draft" not in inputs:
            return paths
        made = (catalog.get(name) for name in node.outputs)
        drafts = (one.draft() for one in made if isinstance(one, FolderDataset | RecordsDataset))
        if (draft := next(drafts, None)) is None:
            raise UserError(
                f"The node {node.short_name} fills a folder, which the catalog does not have for"
                f" {' and '.join(node.outputs)}: expected a FolderDataset, as in conf/base/catalog.yml."
            )
        return {**paths, "draft": draft}

    @hook_impl
    def after_pipeline_run(self, pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        if "adapters" in pipeline.all_outputs():
            from visual_grpo.training.resuming import mark_finished

            mark_finished(Path(catalog.load("parameters").tracking.checkpoints))


def _locks(output: Path, checkpoints: Path, pipeline: Pipeline, catalog: CatalogProtocol) -> Iterator[Path]:
    """Yields a file for each folder that the command must have alone: its output folder, or what a node apart makes."""
    for node in pipeline.nodes:
        for path in filter(None, (path_of(catalog, name) for name in node.outputs)):
            apart = "apart" in node.tags or output.resolve() not in path.resolve().parents
            yield path.with_name(f".{path.name}.lock") if apart else output / ".lock"
    if "adapters" in pipeline.all_outputs() and output.resolve() not in checkpoints.resolve().parents:
        yield checkpoints.with_name(f".{checkpoints.name}.lock")


def about(catalog: CatalogProtocol, name: str) -> Mapping[str, Any]:
    """Returns the metadata of a dataset in the catalog; empty if it has none."""
    return getattr(catalog.get(name), "metadata", None) or {}


def tags_of(pipeline: Pipeline) -> set[str]:
    return set().union(*(node.tags for node in pipeline.nodes))


def _missing_error(missing: list[str], catalog: CatalogProtocol) -> UserError:
    makers = {name: about(catalog, name).get("made_by", "nothing in this project") for name in missing}
    lines = [f"  {name} ({path_of(catalog, name)}), made by {maker}" for name, maker in makers.items()]
    named = sorted({*makers.values()} & {*pipelines}, key=[*DATA_FLOW, *pipelines].index)
    return UserError("\n".join(["Inputs of this pipeline are missing:", *lines]), remedy=",".join(named) or None)
