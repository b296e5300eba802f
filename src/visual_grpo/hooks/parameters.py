"""Completes, checks and types the parameters before anything else; takes over the parameters of a judged training."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.config import AbstractConfigLoader, OmegaConfigLoader
from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from omegaconf import OmegaConf

from visual_grpo.adapter_folder import BASE, LATEST, NONE, read_facts
from visual_grpo.common import console
from visual_grpo.common.digests import digest_once
from visual_grpo.common.errors import UserError
from visual_grpo.common.hub import added_up, in_all
from visual_grpo.common.processes import is_rank
from visual_grpo.config import Parameters
from visual_grpo.config.credentials import find_secrets
from visual_grpo.config.decides import Decides, declared
from visual_grpo.config.pipelines import CHAMPION
from visual_grpo.config.places import OUTPUT, use_catalog
from visual_grpo.config.presets import LISTED, PRESETS
from visual_grpo.config.schema import Resume
from visual_grpo.config.validation import validate
from visual_grpo.data.datasets import require_path
from visual_grpo.hooks.inputs_and_outputs import tags_of
from visual_grpo.models.lora_lookup import lora_at_commit
from visual_grpo.operations.command import Command
from visual_grpo.starter.world_defaults import with_world
from visual_grpo.tracking.adapter_lookup import find_adapters, find_version, start_digest, start_of_training
from visual_grpo.tracking.run_context import RunContext
from visual_grpo.tracking.tracker import check_packages
from visual_grpo.tracking.trust import require_adapters, require_checkpoint, require_version

if TYPE_CHECKING:
    from visual_grpo.models.run_spec import RunSpec  # It imports torch.

RUN_SPEC, RUN_CONTEXT = "params:run_spec", "params:run_context"
"""The parameters, resolved for the model (`models.run_spec`); the command (`tracking.run_context.RunContext`)."""
RETRAIN = "retrain"
"""The section that is not stored with a run, so that a file may hold a secret address in it. The command is stored."""
PARAMETERS_OF = "parameters_of."
"""Before the name of a parameter in a tag of `visual_grpo.pipelines`."""


class ProjectConfigLoader(OmegaConfigLoader):
    """Completes ``parameters`` with the starter's world, and places ``catalog`` in their folder ``output``.

    A loader, not a hook, because Kedro-Viz runs without the project's hooks.
    """

    def __getitem__(self, key: str) -> dict[str, Any]:
        if key == "parameters" and key not in self:
            use_catalog(self._catalog(OUTPUT))  # It also says where the results of other commands are.
            tree = with_world(super().__getitem__(key), self.env)
            self[key] = _for_all_modules(tree, self._of_environment())
        elif key == "catalog" and key not in self:
            self[key] = self._catalog(self["parameters"]["output"])
        return super().__getitem__(key)

    def _of_environment(self) -> dict[str, Any]:
        """Returns the parameters in the files of the environment, ``local`` if none is named.

        Those of --params replace them, if there are any files.
        """
        folder = Path(self.conf_source) / (self.env or self.default_run_env)
        found: dict[str, Any] = self.load_and_merge_dir_config(
            str(folder), self.config_patterns["parameters"], "parameters", set()
        )
        return found

    def _catalog(self, output: str) -> dict[str, Any]:
        OmegaConf.register_new_resolver("output", lambda: output, replace=True)
        return super().__getitem__("catalog")


class ParameterHooks:
    """Refuses bad parameters before a database, a folder or a model is touched; hands them to the nodes typed."""

    @hook_impl(tryfirst=True)
    def after_context_created(self, context: KedroContext) -> None:
        tree = _read(context.config_loader, "parameters")
        self._runtime = context.config_loader.runtime_params or {}
        for name in find_secrets(self._runtime.get(RETRAIN, {}), RETRAIN):
            raise UserError(
                f"--params: {name} looks like a secret, and the command is stored with its run. Set it in"
                " conf/local/parameters.yml instead."
            )
        given = tree
        tree, self._taken = _of_resumed_run(tree, self._runtime)
        is_resumed = tree is not given
        self._kept = {name: value for name, value in self._taken.items() if declared(name) & Decides.ASKED}
        if tree.get("output") != given.get("output"):
            self._kept["output"] = tree["output"]
        tree = _for_all_modules(tree, self._runtime)
        context.config_loader["parameters"] = tree
        self._parameters = validate(tree)
        if not is_resumed and (problem := next(self._parameters.data.unread(), None)):
            raise UserError(problem)
        context.config_loader["catalog"] = _read(context.config_loader, "catalog")

    @hook_impl
    def after_catalog_created(self, catalog: CatalogProtocol) -> None:
        """Replaces the YAML's dictionaries by the validated objects."""
        put_parameters(self._parameters, catalog)

    @hook_impl(tryfirst=True)
    def before_pipeline_run(self, pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Looks up data, rewards, device and model before the first node, and chooses the rewards.

        A typo must not cost minutes of pretraining, nor end the MLflow run that it resumes.
        """
        from visual_grpo.operations.preflight.check import check_before_run  # It imports torch.

        # After `InputHooks`, which says what the command is.
        replace(Command.current(), kept=self._kept).set_current()
        makes = pipeline.all_outputs()
        latest = require_path(catalog, "adapters")
        given = catalog.load("parameters")
        trains = "adapters" in makes
        present = _for_training(given) if trains else _with_adapters(given, pipeline, latest, self._runtime)
        if present.distributed.processes > 1 and "distributed" in tags_of(pipeline) and not is_rank():
            from visual_grpo.grpo.distributed.torchrun import rerun  # It imports torch.

            rerun(present.distributed.processes)
        with added_up() as coming:
            parameters, spec, notes = check_before_run(
                present, makes, tags_of(pipeline), lambda: catalog.load("records")
            )
            if spec is not None and trains:
                parameters = _with_start_at_commit(parameters)
                spec = replace(spec, config=parameters)
                if not (parameters.model_is_pretrained and "base_model" in makes):
                    _check_start(spec, latest)
        if parameters.resume == Resume.SAME and trains:
            assert spec is not None  # Every pipeline that trains resolves the model.
            parameters = _same_or_fresh(spec, pipeline, catalog, latest)
        put_parameters(parameters, catalog)
        if spec is not None:
            catalog[RUN_SPEC] = replace(spec, config=parameters)
        if "rewards" in tags_of(pipeline) and parameters.reward in PRESETS.keys() - {LISTED}:
            weights = ", ".join(
                f"{name}: {'judge' if reward.judge else f'weight {reward.weight:g}'}"
                for name, reward in parameters.rewards.items()
            )
            chosen = "" if parameters.reward == present.reward else ", chosen from the records"
            console.note(f"Reward preset{chosen}: {parameters.reward} ({weights})")
        for note in filter(None, (*notes, in_all(coming))):
            console.note(note)
        if trains:
            check_packages(parameters.tracking)
        if self._taken:
            shown = ", ".join(f"{name}={value}" for name, value in self._taken.items())
            console.note(f"Parameters kept from the resumed run that differ from the configuration: {shown}")


def _read(loader: AbstractConfigLoader, what: str) -> dict[str, Any]:
    """Reads the files of ``what``; raises UserError where Kedro would raise an error of Python."""
    try:
        return dict(loader[what])
    except UnicodeDecodeError as error:  # It has the file's content, not its name.
        files = (file for file in Path(loader.conf_source).rglob("*.y*ml") if file.read_bytes() == error.object)
        raise UserError(f"{next(files, loader.conf_source)} is not valid UTF-8: {error}. Save it as UTF-8.") from error
    except (ValueError, AttributeError) as error:
        raise UserError(f"The configuration in {loader.conf_source} cannot be read: {error}") from error


def _with_adapters(present: Parameters, pipeline: Pipeline, latest: Path, runtime: dict[str, Any]) -> Parameters:
    """Returns the parameters of the training whose adapters the pipeline uses; ``present`` where it uses none.

    Raises UserError where their provenance has what a stranger's may not (`tracking.trust`).
    """
    tags = sorted(tag for tag in tags_of(pipeline) if tag.startswith(PARAMETERS_OF))
    names: list[str] = [attrgetter(tag.removeprefix(PARAMETERS_OF))(present) for tag in tags]
    named = next((name for name in names if name != NONE and (name != LATEST or latest.is_dir())), None)
    if named is None:
        return present
    from visual_grpo.operations.reproduction.repeat import require_own  # It imports torch.
    from visual_grpo.provenance import parameters_of_training, without_scoring

    folder = find_adapters(named, latest)
    facts = read_facts(folder)
    trained = facts.get("parameters", {})
    require_version(folder, trained)
    if "promotion_result" in pipeline.all_outputs():  # What is registered is this project's own from then on.
        require_own(folder, facts, Path.cwd(), present)
    tree = parameters_of_training(present.model_dump(mode="json"), trained, runtime)
    if "unscored" in tags_of(pipeline):
        tree = without_scoring(tree)
    require_adapters(folder, tree, present, given=runtime)  # Before the world, which may be code.
    return validate(with_world(tree))


def _with_start_at_commit(config: Parameters) -> Parameters:
    """Returns the parameters with the commit of a LoRA on the hub in ``train.start``."""
    start = lora_at_commit(config.train.start, "train.start")
    return config.model_copy(update={"train": config.train.model_copy(update={"start": start})})


def _check_start(spec: RunSpec, latest: Path) -> None:
    from visual_grpo.training.components import check_start  # It imports torch.

    start = spec.config.train.start
    if start != BASE and (found := start_of_training(start, latest)):
        check_start(spec, found)


def _for_training(present: Parameters) -> Parameters:
    """Returns the parameters with the present champion's version in the place of ``champion`` in ``train.start``.

    Raises UserError where they name a second adapter to judge besides the one that is trained.
    """
    if present.adapter != LATEST:
        raise UserError(
            f"adapter is {present.adapter!r}, but this command trains and judges a new adapter. Evaluate"
            " the named one without training.",
            remedy="evaluate",
        )
    if present.train.start != CHAMPION:
        return present
    # The run says which version it started from.
    start = find_version(f"models:/{present.promotion.name(present.output)}@{present.promotion.alias}").uri
    return present.model_copy(update={"train": present.train.model_copy(update={"start": start})})


def _for_all_modules(tree: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Lets ``grpo.NAME`` of a ``later`` source replace what an earlier one, such as conf/base, sets for single modules.

    ``tree`` has the parameters of both.
    """
    shared, per_module, modules = later.get("grpo"), later.get("modules", {}), tree.get("modules")
    if not isinstance(shared, dict) or not isinstance(per_module, dict) or not isinstance(modules, dict):
        return tree
    kept = dict(modules)
    for module, settings in modules.items():
        if isinstance(settings, dict):
            own = per_module.get(module)
            replaced = shared.keys() - (own.keys() if isinstance(own, dict) else ())
            kept[module] = {name: value for name, value in settings.items() if name not in replaced}
    return {**tree, "modules": kept}


def _same_or_fresh(spec: RunSpec, pipeline: Pipeline, catalog: CatalogProtocol, latest: Path) -> Parameters:
    """Resolves ``resume=same``: ``auto`` if the newest checkpoint is of this very training, else ``never``."""
    from visual_grpo.training import made_with, resuming

    if pipeline.all_outputs() & {"records", "base_model"}:
        raise UserError(
            "resume=same compares model and data with the checkpoint, but this command makes them. Run only train.",
            remedy="train",
        )
    parameters, base_model, records = spec.config, catalog.load("base_model"), catalog.load("records")
    start = start_of_training(parameters.train.start, latest)
    now = made_with.of(spec, base_model, records.digest, start_digest(start))
    why = resuming.why_another(Path(parameters.tracking.checkpoints), now)
    if why is not None:
        console.note(f"Starting at step 1: {why}")
    return parameters.model_copy(update={"resume": (Resume.AUTO if why is None else Resume.NEVER).value})


def _of_resumed_run(tree: dict[str, Any], runtime: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the parameters of the run that ``resume`` names with those of ``--params``, and which of them differ.

    Without such a run it is ``tree`` itself, and none differs. Raises UserError as `_with_adapters` does.
    """
    resume, tracking = tree.get("resume"), tree.get("tracking")
    checkpoints = tracking.get("checkpoints") if isinstance(tracking, dict) else None
    # With ``same`` the parameters come from this command; the validation says what is wrong with other types.
    if resume in (Resume.NEVER, Resume.SAME) or not isinstance(resume, str) or not isinstance(checkpoints, str):
        return tree, {}
    from visual_grpo.grpo.checkpoint import SUMS
    from visual_grpo.training import resuming

    run = resuming.find_run(resume, Path(checkpoints))
    if run is None:
        return tree, {}
    require_version(run.checkpoint, run.parameters)
    present = validate(tree)
    used = resuming.parameters_of_run(run, runtime) | {"resume": resume, "trust": present.trust}
    if resume == Resume.AUTO or "output" in runtime:  # The folder may have been moved since.
        used["output"] = tree["output"]
        used["tracking"] = {**used["tracking"], "checkpoints": checkpoints}
    require_checkpoint(run.checkpoint, digest_once(run.checkpoint / SUMS), run.parameters, used, present, runtime)
    used = with_world(used)  # Now, since it may be code.
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

    A node that builds the model or a scorer takes the whole tree: these depend on values of several sections.
    """
    sections = {f"params:{name}": getattr(config, name) for name in Parameters.model_fields}
    # Kedro's datasets hold no None: `reward` is read from the whole tree.
    known = {"parameters": config, RUN_CONTEXT: RunContext()}
    return known | {name: value for name, value in sections.items() if value is not None}
