"""The MLflow run of a command."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import Any

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node

from visual_grpo import provenance
from visual_grpo.adapter_folder import adapter_digest, read_facts
from visual_grpo.common import console
from visual_grpo.common.errors import UserError, user_error
from visual_grpo.config import Parameters, flatten
from visual_grpo.config.decides import Decides, decides
from visual_grpo.config.pipelines import DATA_FLOW
from visual_grpo.config.places import UNNAMED_ENVIRONMENTS
from visual_grpo.config.stated import parameters_digest
from visual_grpo.data.datasets import require_path
from visual_grpo.hooks.inputs_and_outputs import tags_of
from visual_grpo.hooks.parameters import RUN_CONTEXT
from visual_grpo.operations.command import render
from visual_grpo.tracking import run_context
from visual_grpo.tracking.adapter_lookup import find_adapters, training_run
from visual_grpo.tracking.mlflow_api import CHANGED, NOT_EVALUATED, NOTHING_TRAINED, VERDICT, use_project
from visual_grpo.tracking.sync import TAGGED, made_others, training_params
from visual_grpo.tracking.tracker import Tracker
from visual_grpo.tracking.trust import PARAMETERS

log = logging.getLogger(__name__)

_MOST_CHANGES = 2
"""Changed parameters in a name."""
_LONGEST_VALUE = 40


class TrackingHooks:
    """Starts the MLflow run of a command, with a name, lineage tags and parameters.

    A resumed training and the evaluation of an adapter continue in the training's own run. MLflow's own variables
    MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID and MLFLOW_RUN_NAME say where and as what.
    """

    @hook_impl(tryfirst=True)
    def after_context_created(self, context: KedroContext) -> None:
        self._project_path = Path(context.project_path)
        use_project(self._project_path)
        self._environment = None if context.env in UNNAMED_ENVIRONMENTS else context.env
        self._runtime = flatten(context.config_loader.runtime_params or {})

    @hook_impl
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        config: Parameters = catalog.load("parameters")
        names = run_params.get("pipeline_names") or ["__default__"]
        if "tracked" not in tags_of(pipeline):
            return
        makes, latest = pipeline.all_outputs(), require_path(catalog, "adapters")
        trains, judges_only = "adapters" in makes, "trained" in makes and "adapters" not in makes
        resumed, earlier = None, None
        modules: Sequence[str] = ()
        if trains:
            from visual_grpo.training import resuming

            modules = catalog.load("params:run_spec").modules
            resumed = resuming.resumed_run(config)
            earlier = None if resumed is None else resumed.mlflow_run_id
        elif judges_only:
            earlier = _run_of(find_adapters(config.adapter, latest))
        named = os.environ.get("MLFLOW_RUN_ID")
        changed = changed_parameters(config, latest, self._runtime)
        name = os.environ.get("MLFLOW_RUN_NAME") or run_name(config, modules, names, self._environment, changed)
        tracker = Tracker.start(name, Path(config.output), console.note, earlier=named or earlier)
        catalog[RUN_CONTEXT] = run_context.RunContext(self._project_path, tracker)
        if earlier is not None and named is None and not tracker.continues:
            log.warning("MLflow run %s is gone: a new run begins", earlier)
        if tracker.continues and judges_only:
            tracker.evaluation_begins(run_context.command())
            return
        earlier_tags = {} if resumed is None else resumed.provenance
        earlier_tags = {name: value for name, value in earlier_tags.items() if name.startswith(TAGGED)}
        tracker.tags(provenance.continued(earlier_tags, run_context.tags(self._project_path)))
        if trains:
            tracker.own(PARAMETERS, parameters_digest(config.public()))
        tracker.params(training_params(config.public()))
        if tracker.continues:
            if resumed is None or "MLFLOW_RUN_NAME" in os.environ:
                tracker.rename(lambda _: name)
            else:
                before, now = training_params(resumed.parameters), training_params(config.public())
                tracker.rename(lambda old: renamed(old, before, now))
        else:
            tracker.tags({VERDICT: NOT_EVALUATED if trains else NOTHING_TRAINED})
            tracker.tags({CHANGED: ", ".join(f"{name}={_short(value)}" for name, value in changed.items())})

    @hook_impl
    def after_pipeline_run(self) -> None:
        Tracker.active().end("FINISHED")

    @hook_impl
    def on_node_error(self, error: Exception, node: Node) -> None:
        tracker = Tracker.active()
        tracker.tags({"evaluate.error.node" if tracker.evaluates else "error.node": node.short_name})

    @hook_impl
    def on_pipeline_error(self, error: Exception) -> None:
        tracker = Tracker.active()
        known = user_error(error)
        message = f"{type(error).__name__}: {error}" if known is None else render(known)
        tracker.tags({"evaluate.error" if tracker.evaluates else "error": message})
        tracker.end("FAILED")


def _run_of(adapters: Path) -> str | None:
    """Returns the run of the training that made the adapters, in which their evaluation goes on."""
    facts = read_facts(adapters)
    with suppress(UserError):  # MLflow is away: the run is found, or made, when the evaluation is logged.
        run = training_run(facts)
        if run is not None and made_others(run, adapter_digest(adapters)):
            log.warning("MLflow run %s made other adapters than %s: a new run begins", run.info.run_id, adapters)
            return None
    return facts.get("mlflow_run_id")


def changed_parameters(config: Parameters, latest: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns by their dotted names those parameters that a result depends on and that were ``given`` with
    ``--params``, then those that differ from the training whose adapters are in ``latest``."""
    now, before = training_params(config.public()), {}
    if "reward" in given:
        now["reward"] = given["reward"]  # By now, its preset is a list of rewards.
    with suppress(UserError):  # There are no adapters, or nobody can use them.
        before = training_params(read_facts(latest)["parameters"])
    names = [name for name in now if any(name == one or name.startswith(f"{one}.") for one in given)]
    names += [name for name, value in now.items() if before and before.get(name) != value]
    return {name: now[name] for name in dict.fromkeys(names) if decides(name, Decides.EVERYTHING, rounding=False)}


def run_name(
    config: Parameters,
    modules: Sequence[str],
    pipelines: Sequence[str],
    environment: str | None,
    changed: Mapping[str, Any],
) -> str:
    """Names a run: ``kl_weight=0.1 ar+dit``; without a training ``seed=1 baseline``.

    MLflow's table shows about 24 characters, so what distinguishes the run comes first, and its tag ``changed`` has the
    rest.

    Args:
        modules: those that are trained; () = none.
        environment: Kedro's; None = the default one.
        changed: `changed_parameters`; they are called by the last part of their names.
    """
    ordered = [name for name in DATA_FLOW if name in pipelines] + sorted(set(pipelines) - set(DATA_FLOW))
    # Words of the name, after the parameters that they show.
    always = {
        "environment": environment or "",
        "data.path": "" if config.data_is_rendered else Path(config.data.path).name,
        "policy.train": "+".join(modules or ordered),
        "policy.stages": "joint" if config.policy.stages == "joint" and len(modules) > 1 else "",
    }
    changes = [f"{name.rpartition('.')[2]}={_short(value)}" for name, value in changed.items() if name not in always]
    more = ["..."] if len(changes) > _MOST_CHANGES else []
    return " ".join(filter(None, [*changes[:_MOST_CHANGES], *more, *always.values()]))


def renamed(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns the name of a resumed run with the values of its parameters ``now``; they were those ``before``."""
    for parameter, value in now.items():
        old = before.get(parameter)
        if old == value or not decides(parameter, Decides.EVERYTHING, rounding=False):
            continue
        short = parameter.rpartition(".")[2]
        was, shown = f"{short}={_short(old)}", f"{short}={_short(value)}"
        words = f" {name} "
        name = words.replace(f" {was} ", f" {shown} ").strip() if f" {was} " in words else f"{shown} {name}"
    return name


def _short(value: object) -> str:
    """Returns a value as ``--params`` takes it: null, not None."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shorten(text, _LONGEST_VALUE, placeholder="...")
