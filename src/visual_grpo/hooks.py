"""Kedro hooks: checks before the first node, typed parameters, the MLflow run.

Nodes only transform data; everything around them is here.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.framework.project import pipelines
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node
from kedro_mlflow.config.kedro_mlflow_config import KedroMlflowConfig
from kedro_mlflow.framework.hooks.mlflow_hook import MlflowHook
from omegaconf import OmegaConf

from visual_grpo import components, console, lineage
from visual_grpo.config import Parameters, flatten
from visual_grpo.config.outputs import with_output_folders
from visual_grpo.config.validation import validate
from visual_grpo.datasets.parameters import parameter_entries
from visual_grpo.errors import UserError, user_error
from visual_grpo.tracking import Tracker, run_exists

RECORDS = "records"
NEEDS_MODEL = {"starter_report", "baseline", "adapters", "trained"}
"""Datasets that name the model, or that the model and the rewards make."""

log = logging.getLogger(__name__)


class ParameterHooks:
    """Refuses bad parameters before a database, a folder or a model is touched; hands them to the nodes typed."""

    @hook_impl(tryfirst=True)
    def after_context_created(self, context: KedroContext) -> None:
        tree = with_output_folders(context.config_loader["parameters"], context.env)
        context.config_loader["parameters"] = tree
        self._parameters = validate(tree)
        # Paths of the catalog begin with it.
        OmegaConf.register_new_resolver("output", lambda: self._parameters.output, replace=True)

    @hook_impl
    def after_catalog_created(self, catalog: CatalogProtocol) -> None:
        """Puts the validated objects in the place of the YAML's dictionaries.

        Kedro types single ``params:`` sections by a node's annotations; some rules hold between sections, and some
        nodes need the whole tree.
        """
        for name, value in parameter_entries(self._parameters).items():
            if name in catalog:
                catalog.save(name, value)
            else:  # A section that has defaults only.
                catalog[name] = value

    @hook_impl(tryfirst=True)
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Looks up rewards, device, model and checkpoint before the first node.

        A typo must not cost minutes of pretraining, nor end the MLflow run that it resumes.
        """
        if NEEDS_MODEL & pipeline.all_outputs():
            components.check(self._parameters)
        if "adapters" in pipeline.all_outputs() and self._parameters.resume == "auto":
            from visual_grpo.training import check_resumable

            check_resumable(self._parameters)


class InputHooks:
    """Refuses to start without the data that other pipelines make; prints each node's name as it starts."""

    @hook_impl(tryfirst=True)
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        missing = [name for name in sorted(pipeline.inputs()) if not _is_there(catalog, name)]
        if missing:
            raise UserError(_missing_message(missing, catalog))

    @hook_impl
    def before_node_run(self, node: Node) -> None:
        console.heading(node.name)


class TrackingHooks(MlflowHook):
    """kedro-mlflow's run, with lineage tags, parameters under their own names, and resuming."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        super().after_context_created(context)
        self._project_path = Path(context.project_path)
        self._parameters = validate(context.config_loader["parameters"])
        self._dataset_seen = False
        mlflow_config: KedroMlflowConfig = context.mlflow  # type: ignore[attr-defined]  # set by kedro-mlflow
        run = mlflow_config.tracking.run
        if run.id is None and self._parameters.resume == "auto":
            checkpoints = self._project_path / self._parameters.tracking.checkpoints
            run.id = _run_to_resume(checkpoints, mlflow_config.server.mlflow_tracking_uri)

    @hook_impl
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        super().before_pipeline_run(run_params, pipeline, catalog)
        tracker = Tracker.active()
        tracker.tags(lineage.tags(self._project_path))
        tracker.params(flatten(self._parameters.model_dump(mode="json")))

    @hook_impl
    def before_node_run(self, node: Node, catalog: CatalogProtocol, inputs: dict[str, Any], is_async: bool) -> None:
        # Without inputs kedro-mlflow logs no parameters. They are logged already, and MLflow refuses to change
        # ``resume``, which differs in a resumed run.
        super().before_node_run(node, catalog, {}, is_async)

    @hook_impl
    def after_dataset_loaded(self, dataset_name: str, data: Any) -> None:
        if dataset_name == RECORDS and not self._dataset_seen:
            self._log_dataset(data.digest, self._parameters)

    @hook_impl
    def after_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        if RECORDS in pipeline.all_outputs() and not self._dataset_seen:
            self._log_dataset(catalog.load(RECORDS).digest, self._parameters)
        super().after_pipeline_run(run_params, pipeline, catalog)

    @hook_impl
    def on_node_error(self, error: Exception, node: Node) -> None:
        Tracker.active().tags({"error.node": node.name})

    @hook_impl
    def on_pipeline_error(
        self, error: Exception, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol
    ) -> None:
        Tracker.active().tags({"error": str(user_error(error) or f"{type(error).__name__}: {error}")})
        super().on_pipeline_error(error, run_params, pipeline, catalog)

    def _log_dataset(self, digest: str, parameters: Parameters) -> None:
        self._dataset_seen = True
        tracker = Tracker.active()
        tracker.tags({"dataset.digest": digest})
        tracker.dataset(RECORDS, digest, parameters.data.path)


def _is_there(catalog: CatalogProtocol, name: str) -> bool:
    if name == "parameters" or name.startswith("params:"):
        return True
    return bool(catalog.exists(name))


def _missing_message(missing: list[str], catalog: CatalogProtocol) -> str:
    pipelines.set_requested(None)
    makers = {output: name for name in pipelines if name != "__default__" for output in pipelines[name].all_outputs()}
    lines = []
    for name in missing:
        command = f"kedro run --pipeline={makers[name]}" if name in makers else "nothing in this project"
        lines.append(f"  {name}{_path(catalog, name)}, made by: {command}")
    return "Inputs of this pipeline are missing:\n" + "\n".join(lines)


def _path(catalog: CatalogProtocol, name: str) -> str:
    dataset = catalog.get(name)
    described = dataset._describe() if dataset is not None else {}
    return f" ({described['filepath']})" if "filepath" in described else ""


def _run_to_resume(checkpoints: Path, tracking_uri: str) -> str | None:
    """The MLflow run of the newest training checkpoint, if both still exist."""
    latest = checkpoints / "latest.json"
    if not latest.is_file():
        return None
    run_id = json.loads(latest.read_text(encoding="utf-8")).get("mlflow_run_id")
    if run_id is not None and not run_exists(run_id, tracking_uri):
        log.warning("MLflow run %s of the checkpoint is gone: logging to a new run.", run_id)
        return None
    return None if run_id is None else str(run_id)
