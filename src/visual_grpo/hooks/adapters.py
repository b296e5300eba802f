"""Finds adapters of earlier runs and judges them with the parameters of their training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline

from visual_grpo.common.errors import UserError
from visual_grpo.config import Parameters
from visual_grpo.config.adapter_folder import LATEST, NONE, parameters_to_judge, read_facts
from visual_grpo.config.command import rerun_command
from visual_grpo.config.pipelines import CHAMPION
from visual_grpo.config.schema import validate
from visual_grpo.hooks.parameters import put_parameters
from visual_grpo.tracking.model_ref import find_adapters
from visual_grpo.tracking.registry import Registry


class AdapterHooks:
    """Evaluates an adapter with the parameters that it was trained with."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        self._given = context.config_loader.runtime_params or {}

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
            tree = parameters_to_judge(present.model_dump(mode="json"), trained, self._given)
            put_parameters(validate(tree), catalog)


def _from_the_champion(present: Parameters) -> Parameters:
    """With the version that is the champion now: the run says which one it started from.

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
    """The folder of the adapters whose training decides the parameters; None where the present ones count."""
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
