"""The MLflow run of a command."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node
from kedro_mlflow.config.kedro_mlflow_config import KedroMlflowConfig
from kedro_mlflow.framework.hooks.mlflow_hook import MlflowHook
from kedro_mlflow.io.catalog.switch_catalog_logging import switch_catalog_logging

from visual_grpo import components, console
from visual_grpo.config import Parameters, flatten
from visual_grpo.config.outputs import UNNAMED_ENVIRONMENTS
from visual_grpo.errors import user_error
from visual_grpo.tracking import RunToLog, Tracker, lineage
from visual_grpo.tracking.adapters import find_adapters
from visual_grpo.tracking.description import in_words, other_name, training_name
from visual_grpo.tracking.relocation import default_artifacts, use_server
from visual_grpo.trained_adapters import read_facts

if TYPE_CHECKING:
    from visual_grpo.resuming import Origin

RECORDS = "records"

log = logging.getLogger(__name__)


class TrackingHooks(MlflowHook):
    """The run that kedro-mlflow's configuration asks for, with a name, lineage tags and parameters.

    A resumed training goes on in its own run, and so does the evaluation of an adapter. Everything goes through the
    `Tracker`'s spool: MLflow may be away at any time, also at the start.
    """

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Only reads: kedro-mlflow's own part would create the database before the command is checked."""
        self._context, self._project_path = context, Path(context.project_path)
        self.mlflow_config = KedroMlflowConfig.model_validate(context.config_loader["mlflow"])
        context.__setattr__("mlflow", self.mlflow_config)  # For ``kedro mlflow ui``.
        use_server(self.mlflow_config.server.mlflow_tracking_uri, self._project_path)
        self._environment = None if context.env in UNNAMED_ENVIRONMENTS else context.env
        self._given = flatten(context.config_loader.runtime_params or {})
        self._dataset_seen = False

    @hook_impl
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        config: Parameters = catalog.load("parameters")
        self._parameters = config
        names = run_params.get("pipeline_names") or ["__default__"]
        self._is_mlflow_enabled = not set(names) <= set(self.mlflow_config.tracking.disable_tracking.pipelines or ())
        self.run_id = None
        if not self._is_mlflow_enabled:
            switch_catalog_logging(catalog, False)
            return
        tracker = self._start(config, run_params, pipeline)
        # For datasets of kedro-mlflow, which need an active run, and only for them: it would wait for MLflow.
        self.run_id = (
            tracker.run_id if any(_is_of_kedro_mlflow(catalog, name) for name in pipeline.datasets()) else None
        )
        if tracker.continues and _judges_only(pipeline):
            tracker.evaluation_begins(lineage.command())
            self._dataset_seen = True  # That of the training.
            return
        origin = self._origin(config, pipeline)
        tags = lineage.resumed({} if origin is None else origin.lineage, lineage.tags(self._project_path))
        tracker.tags(tags | self._description(config, pipeline, lineage.commands(tags)))
        tracker.params(flatten(config.public()))

    def _start(self, config: Parameters, run_params: dict[str, Any], pipeline: Pipeline) -> Tracker:
        settings = self.mlflow_config
        # kedro-mlflow's own set-up would wait for MLflow.
        settings._export_credentials(self._context)
        settings._register_request_header_provider(self._context)
        run, experiment = settings.tracking.run, settings.tracking.experiment
        earlier = run.id or self._earlier_run(config, pipeline)
        location = experiment.create_experiment_kwargs.artifact_location
        tracker = Tracker.start(
            RunToLog(
                name=run.name or self._name(config, run_params, pipeline),
                earlier=earlier,
                experiment=experiment.name,
                artifacts=default_artifacts(settings.server.mlflow_tracking_uri, location, self._project_path),
                tracking_uri=settings.server.mlflow_tracking_uri,
                output=Path(config.output),
                trains=_trains(pipeline),
            ),
            console.note,
        )
        if run.id is not None and not tracker.continues:
            log.info("MLflow has no run %s yet: this one is found by that key from now on.", run.id)
        elif earlier is not None and not tracker.continues:
            log.warning(
                "MLflow run %s of the %s is gone: logging to a new run.",
                earlier,
                "adapter" if _judges_only(pipeline) else "checkpoint",
            )
        if tracker.continues and _trains(pipeline):
            tracker.goes_on_to(config.grpo.steps)
        return tracker

    def _earlier_run(self, config: Parameters, pipeline: Pipeline) -> str | None:
        """The MLflow run that this command continues."""
        if _judges_only(pipeline):
            run_id = read_facts(find_adapters(config.adapter, Path(config.adapters_folder))).get("mlflow_run_id")
            return None if run_id is None else str(run_id)
        origin = self._origin(config, pipeline)
        return None if origin is None else origin.mlflow_run_id

    def _origin(self, config: Parameters, pipeline: Pipeline) -> Origin | None:
        """The training that this command resumes; only a training goes on in its run."""
        from visual_grpo import resuming

        if not _trains(pipeline):
            return None
        return resuming.origin(config.resume, self._project_path / config.tracking.checkpoints)

    def _name(self, config: Parameters, run_params: dict[str, Any], pipeline: Pipeline) -> str:
        if _trains(pipeline):
            modules = components.make_plan(config).modules
            return training_name(config, modules, self._environment, self._given)
        names = run_params.get("pipeline_names") or ["__default__"]
        return other_name(config, names, self._environment, self._given)

    def _description(self, config: Parameters, pipeline: Pipeline, commands: str) -> dict[str, str]:
        if not _trains(pipeline):
            return {}
        return {"mlflow.note.content": in_words(config, components.make_plan(config).modules, commands)}

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
        if not self._is_mlflow_enabled:
            switch_catalog_logging(catalog, True)
        Tracker.active().finished()

    @hook_impl
    def on_node_error(self, error: Exception, node: Node) -> None:
        tracker = Tracker.active()
        tracker.tags({"evaluate.error.node" if tracker.evaluates else "error.node": node.name})

    @hook_impl
    def on_pipeline_error(
        self, error: Exception, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol
    ) -> None:
        tracker = Tracker.active()
        said = str(user_error(error) or f"{type(error).__name__}: {error}")
        tracker.tags({"evaluate.error" if tracker.evaluates else "error": said})
        # Not kedro-mlflow's: it would let the training fail whose evaluation fails.
        tracker.failed()

    def _log_dataset(self, digest: str, parameters: Parameters) -> None:
        self._dataset_seen = True
        tracker = Tracker.active()
        tracker.tags({"dataset.digest": digest})
        tracker.dataset(RECORDS, digest, parameters.data.path)


def _trains(pipeline: Pipeline) -> bool:
    return "adapters" in pipeline.all_outputs()


def _judges_only(pipeline: Pipeline) -> bool:
    """Whether an adapter of an earlier command is judged."""
    return "trained" in pipeline.all_outputs() and not _trains(pipeline)


def _is_of_kedro_mlflow(catalog: CatalogProtocol, name: str) -> bool:
    return type(catalog.get(name)).__module__.startswith("kedro_mlflow")
