"""Parameters: checked before anything else, and typed for the nodes."""

from __future__ import annotations

from typing import Any

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from omegaconf import OmegaConf

from visual_grpo import console
from visual_grpo.command import Command
from visual_grpo.config import Parameters
from visual_grpo.config.outputs import with_output_folders
from visual_grpo.config.validation import validate
from visual_grpo.datasets.parameters import parameter_entries
from visual_grpo.preflight import settled
from visual_grpo.secret_values import cover_logs, remember_named
from visual_grpo.tracking.others import check_packages


class ParameterHooks:
    """Refuses bad parameters before a database, a folder or a model is touched; hands them to the nodes typed."""

    @hook_impl(tryfirst=True)
    def after_context_created(self, context: KedroContext) -> None:
        tree = with_output_folders(context.config_loader["parameters"], context.env)
        context.config_loader["parameters"] = tree
        cover_logs()
        remember_named(tree)
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
        """Looks up data, rewards, device, model and checkpoint before the first node, and chooses the rewards.

        A typo must not cost minutes of pretraining, nor end the MLflow run that it resumes.
        """
        before: Parameters = catalog.load("parameters")
        parameters = settled(before, pipeline.all_outputs(), lambda: catalog.load("records"), Command.of(run_params))
        put_parameters(parameters, catalog)
        if parameters.reward != before.reward:
            weights = ", ".join(f"{name} (weight {reward.weight:g})" for name, reward in parameters.rewards.items())
            console.note(f"Reward, chosen by what the records have: {parameters.reward}, that is {weights}")
        if "adapters" in pipeline.all_outputs():
            check_packages(parameters.tracking)
        if "adapters" in pipeline.all_outputs() and parameters.resume == "auto":
            from visual_grpo.training import check_resumable

            check_resumable(parameters)


def put_parameters(parameters: Parameters, catalog: CatalogProtocol) -> None:
    """Into the entries ``parameters`` and ``params:...`` of the catalog."""
    for name, value in parameter_entries(parameters).items():
        if name in catalog:
            catalog.save(name, value)
        else:  # A section that has defaults only.
            catalog[name] = value
