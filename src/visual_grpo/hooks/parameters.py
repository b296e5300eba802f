"""Parameters: checked before anything else, those of an adapter's training where it is judged, typed for the nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from omegaconf import OmegaConf

from visual_grpo.common import console
from visual_grpo.common.errors import UserError
from visual_grpo.config import Parameters
from visual_grpo.config.adapter_folder import LATEST, NONE, parameters_to_judge, read_facts
from visual_grpo.config.command import Command, rerun_command
from visual_grpo.config.pipelines import CHAMPION
from visual_grpo.config.presets import with_output_folders
from visual_grpo.config.schema import validate
from visual_grpo.tracking.adapter_lookup import find_adapters, start_of
from visual_grpo.tracking.registry import Registry
from visual_grpo.tracking.tracker import check_packages

SAME = "same"
"""`resuming.SAME`, a value of the parameter ``resume``; that module imports torch."""


class ParameterHooks:
    """Refuses bad parameters before a database, a folder or a model is touched; hands them to the nodes typed."""

    @hook_impl(tryfirst=True)
    def after_context_created(self, context: KedroContext) -> None:
        tree = with_output_folders(context.config_loader["parameters"], context.env)
        runtime = context.config_loader.runtime_params or {}
        tree, self._taken = _of_resumed_run(tree, runtime)
        tree = _for_all_modules(tree, runtime)
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
        put_parameters(self._parameters, catalog)

    @hook_impl(tryfirst=True)
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Looks up data, rewards, device and model before the first node, and chooses the rewards.

        A typo must not cost minutes of pretraining, nor end the MLflow run that it resumes.
        """
        from visual_grpo.operations.preflight.check import check_before_run  # It imports torch.

        before: Parameters = catalog.load("parameters")
        parameters = check_before_run(
            before, pipeline.all_outputs(), lambda: catalog.load("records"), Command.from_run_params(run_params)
        )
        if parameters.resume == SAME and "adapters" in pipeline.all_outputs():
            parameters = _same_or_fresh(parameters, pipeline, catalog)
        put_parameters(parameters, catalog)
        if parameters.reward != before.reward:
            weights = ", ".join(f"{name} (weight {reward.weight:g})" for name, reward in parameters.rewards.items())
            console.note(f"Reward, chosen by what the records have: {parameters.reward}, that is {weights}")
        if "adapters" in pipeline.all_outputs():
            check_packages(parameters.tracking)
        if self._taken:
            shown = ", ".join(f"{name}={value}" for name, value in self._taken.items())
            console.note(f"Parameters of the resumed run, which are others in the configuration: {shown}")


class AdapterHooks:
    """Evaluates an adapter with the parameters that it was trained with."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        self._runtime = context.config_loader.runtime_params or {}

    @hook_impl(tryfirst=True)
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Replaces the catalog's parameters, where no adapter is trained and one is judged or named."""
        present: Parameters = catalog.load("parameters")
        makes = pipeline.all_outputs()
        if "adapters" in makes and present.adapter != LATEST:
            raise UserError(
                f"adapter is {present.adapter!r}, but this command trains an adapter and judges that one. To judge"
                f" it without training: {rerun_command('evaluate')}"
            )
        if "adapters" in makes and present.train.start == CHAMPION:
            put_parameters(_from_the_champion(present), catalog)
        folder = None if "adapters" in makes else _deciding_adapters(present, makes)
        if folder is not None:
            trained = read_facts(folder)["parameters"]
            tree = parameters_to_judge(present.model_dump(mode="json"), trained, self._runtime)
            put_parameters(validate(tree), catalog)


def _for_all_modules(tree: dict[str, Any], runtime: dict[str, Any]) -> dict[str, Any]:
    """Lets ``grpo.NAME`` of --params replace what a configuration sets for single modules."""
    shared, per_module, modules = runtime.get("grpo"), runtime.get("modules", {}), tree.get("modules")
    if not isinstance(shared, dict) or not isinstance(per_module, dict) or not isinstance(modules, dict):
        return tree
    kept = {
        module: {
            name: value for name, value in settings.items() if name not in shared or name in per_module.get(module, {})
        }
        if isinstance(settings, dict)
        else settings
        for module, settings in modules.items()
    }
    return {**tree, "modules": kept}


def _same_or_fresh(parameters: Parameters, pipeline: Pipeline, catalog: CatalogProtocol) -> Parameters:
    """Resolves ``resume=same``: ``auto`` if the newest checkpoint is of this very training, else ``never``."""
    from visual_grpo.training import resuming
    from visual_grpo.training.runtime_fingerprint import runtime_fingerprint

    if pipeline.all_outputs() & {"records", "starter_report"}:
        raise UserError(
            "resume=same asks whether model and data are those of the checkpoint, but this command makes them. Train"
            f" alone: {Command.current().for_pipeline('train')}"
        )
    starter_report, records = catalog.load("starter_report"), catalog.load("records")
    known = resuming.training_identity(parameters, starter_report, records, start_of(parameters))
    why = resuming.why_another(parameters, known, runtime_fingerprint(parameters))
    if why is not None:
        console.note(f"Starting at step 1: {why}")
    return parameters.model_copy(update={"resume": resuming.AUTO if why is None else resuming.NEVER})


def _of_resumed_run(tree: dict[str, Any], runtime: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the parameters of the run that ``resume`` names with those of ``--params``, and which of them differ.

    Without such a run it is ``tree`` itself, and none differs.
    """
    resume, tracking = tree.get("resume"), tree.get("tracking")
    checkpoints = tracking.get("checkpoints") if isinstance(tracking, dict) else None
    if not isinstance(resume, str) or not isinstance(checkpoints, str):
        return tree, {}  # The validation says what is wrong with it.
    if resume == SAME:
        return tree, {}  # Its parameters are those of this command.
    from visual_grpo.training import resuming

    run = resuming.origin(resume, Path(checkpoints))
    if run is None:
        return tree, {}
    used = resuming.parameters_of_run(run, runtime) | {"resume": resume}
    if resume == resuming.AUTO or "output" in runtime:  # The folder may have been moved since.
        used["output"] = tree["output"]
        used["tracking"] = {**used["tracking"], "checkpoints": checkpoints}
    return used, resuming.inherited_parameters(run, tree, used)


def put_parameters(parameters: Parameters, catalog: CatalogProtocol) -> None:
    """Saves parameters as ``parameters`` and ``params:...`` of the catalog."""
    for name, value in parameter_entries(parameters).items():
        if name in catalog:
            catalog.save(name, value)
        else:  # A section that has defaults only.
            catalog[name] = value


def parameter_entries(config: Parameters) -> dict[str, Any]:
    """Returns ``parameters`` with the whole tree and ``params:<section>`` with each section, typed.

    A node takes the sections that it reads. One that builds the model or a scorer takes the whole tree, since these
    depend on values of several sections.
    """
    sections = {f"params:{name}": getattr(config, name) for name in Parameters.model_fields}
    # Kedro's datasets hold no None: `reward` is read from the whole tree.
    return {"parameters": config} | {name: value for name, value in sections.items() if value is not None}


def _from_the_champion(present: Parameters) -> Parameters:
    """Replaces ``champion`` by its present version, so that the run says which one it started from.

    Raises:
        UserError: there is none, or MLflow does not answer.
    """
    registry = Registry.of(present)
    champion = registry.champion()
    if champion is None:
        raise UserError(
            f"train.start is {CHAMPION}, but there is no {registry.name}@{registry.alias} yet: nothing was promoted."
            " Start from the base model: train.start=base"
        )
    return present.model_copy(update={"train": present.train.model_copy(update={"start": champion.uri})})


def _deciding_adapters(present: Parameters, makes: set[str]) -> Path | None:
    """Returns the adapters whose training decides the parameters; None if the present ones count."""
    if "promotion" in makes:
        named = present.promotion.candidate
    elif "comparison" in makes:
        named = present.compare.second if present.compare.second != NONE else present.compare.first
    elif {"trained", "generated"} & makes or ("baseline" in makes and present.adapter != LATEST):
        named = present.adapter
    else:
        return None
    latest = Path(present.adapters_folder)
    if named == NONE or (named == LATEST and not latest.is_dir()):
        return None
    return find_adapters(named, latest)
