"""The MLflow run of a command."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node
from kedro_mlflow.config.kedro_mlflow_config import KedroMlflowConfig
from kedro_mlflow.framework.hooks.mlflow_hook import MlflowHook

from visual_grpo import components
from visual_grpo.config import Parameters, flatten
from visual_grpo.config.outputs import UNNAMED_ENVIRONMENTS
from visual_grpo.errors import user_error
from visual_grpo.secret_values import hidden
from visual_grpo.tracking import Tracker, lineage, run_exists
from visual_grpo.tracking.adapters import find_adapters
from visual_grpo.tracking.description import in_words, other_name, training_name
from visual_grpo.tracking.relocation import use_server
from visual_grpo.trained_adapters import read_facts

RECORDS = "records"
NAME = "mlflow.runName"

log = logging.getLogger(__name__)


class TrackingHooks(MlflowHook):
    """kedro-mlflow's run, with a name, lineage tags and parameters under their own names; goes on in an earlier run.

    A resumed training goes on in its own run, and so does the evaluation of an adapter.
    """

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Only reads: kedro-mlflow's own part would create the database before the command is checked."""
        self._context, self._project_path = context, Path(context.project_path)
        self.mlflow_config = KedroMlflowConfig.model_validate(context.config_loader["mlflow"])
        context.__setattr__("mlflow", self.mlflow_config)  # For ``kedro mlflow ui``.
        use_server(self.mlflow_config.server.mlflow_tracking_uri, self._project_path)
        self._environment = None if context.env in UNNAMED_ENVIRONMENTS else context.env
        self._given = flatten(hidden(context.config_loader.runtime_params or {}))
        self._dataset_seen = False

    @hook_impl
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        config: Parameters = catalog.load("parameters")
        self._parameters = config
        super().after_context_created(self._context)
        settings: KedroMlflowConfig = self.mlflow_config
        run = settings.tracking.run
        earlier = run.id or self._earlier_run(config, pipeline, settings.server.mlflow_tracking_uri)
        before = Tracker.of(earlier).all_tags()
        run.id = earlier
        run.name = run.name or before.get(NAME) or self._name(config, run_params, pipeline)
        # Hidden: what is deleted from a database stays in its file.
        super().before_pipeline_run(hidden(run_params), pipeline, catalog)
        tracker = Tracker.active()
        # kedro-mlflow's tags describe the command that came last, with absolute paths and objects' addresses.
        tracker.remove_tags({*run_params, "kedro_command"} - before.keys())
        tracker.tags({name: value for name, value in before.items() if name in {*run_params, "kedro_command"}})
        if earlier is not None and _judges_only(pipeline):
            tracker.evaluation_begins(lineage.command())
            self._dataset_seen = True  # That of the training.
            return
        tracker.tags(lineage.tags(self._project_path) | self._description(config, pipeline))
        tracker.params(flatten(config.public()))

    def _earlier_run(self, config: Parameters, pipeline: Pipeline, tracking_uri: str) -> str | None:
        """The MLflow run that this command continues, if it still exists."""
        if _judges_only(pipeline):
            run_id = read_facts(find_adapters(config.adapter, Path(config.adapters_folder))).get("mlflow_run_id")
        elif config.resume == "auto":
            run_id = _run_of_checkpoint(self._project_path / config.tracking.checkpoints)
        else:
            return None
        if run_id is not None and not run_exists(run_id, tracking_uri):
            log.warning(
                "MLflow run %s of the %s is gone: logging to a new run.",
                run_id,
                "adapter" if _judges_only(pipeline) else "checkpoint",
            )
            return None
        return run_id

    def _name(self, config: Parameters, run_params: dict[str, Any], pipeline: Pipeline) -> str:
        if "adapters" in pipeline.all_outputs():
            modules = components.make_plan(config).modules
            return training_name(config, modules, self._environment, self._given)
        names = run_params.get("pipeline_names") or ["__default__"]
        return other_name(config, names, self._environment, self._given)

    def _description(self, config: Parameters, pipeline: Pipeline) -> dict[str, str]:
        if "adapters" not in pipeline.all_outputs():
            return {}
        return {"mlflow.note.content": in_words(config, components.make_plan(config).modules, lineage.command())}

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
        if Tracker.active().evaluates:
            Tracker.active().evaluation_ends()
        super().after_pipeline_run(run_params, pipeline, catalog)

    @hook_impl
    def on_node_error(self, error: Exception, node: Node) -> None:
        tracker = Tracker.active()
        tracker.tags({"evaluate.error.node" if tracker.evaluates else "error.node": node.name})

    @hook_impl
    def on_pipeline_error(
        self, error: Exception, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol
    ) -> None:
        tracker = Tracker.active()
        said = hidden(str(user_error(error) or f"{type(error).__name__}: {error}"))
        tracker.tags({"evaluate.error" if tracker.evaluates else "error": said})
        # Not kedro-mlflow's: it would let the training fail whose evaluation fails.
        tracker.failed()

    def _log_dataset(self, digest: str, parameters: Parameters) -> None:
        self._dataset_seen = True
        tracker = Tracker.active()
        tracker.tags({"dataset.digest": digest})
        tracker.dataset(RECORDS, digest, parameters.data.path)


def _judges_only(pipeline: Pipeline) -> bool:
    """Whether an adapter of an earlier command is judged."""
    return "trained" in pipeline.all_outputs() and "adapters" not in pipeline.all_outputs()


def _run_of_checkpoint(checkpoints: Path) -> str | None:
    """The MLflow run of the newest training checkpoint."""
    latest = checkpoints / "latest.json"
    if not latest.is_file():
        return None
    run_id = json.loads(latest.read_text(encoding="utf-8")).get("mlflow_run_id")
    return None if run_id is None else str(run_id)
