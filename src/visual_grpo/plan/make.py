"""A plan from parameters."""

from __future__ import annotations

from typing import Any

from visual_grpo.config import GRPOConfig, Parameters
from visual_grpo.console import Bar, progress
from visual_grpo.errors import UserError
from visual_grpo.plan.cards import find_card
from visual_grpo.plan.dry_run import DryRunner
from visual_grpo.plan.largest import batches_of, largest
from visual_grpo.plan.models import PlannedModel, planned_model
from visual_grpo.plan.report import Counted, Part, plan_of

_BATCHES = 4
"""About how many largest batches are looked for."""


def make_plan(parameters: Parameters) -> dict[str, Any]:
    """Runs a step and the samplers of the evaluation without values. Raises UserError before that for a card or a
    model that is not known, and for more cards than groups."""
    settings = parameters.plan
    card = None if settings.gpu is None else find_card(settings.gpu)
    parameters = _with_growing_cache(parameters)
    planned = planned_model(parameters)
    config = _share_of_one_card(parameters, planned.plan.modules)
    runner = DryRunner(config, planned, "cpu" if card is None else "cuda")
    usable = card.usable if card is not None and settings.largest_batches else 0
    with progress("Planning", 2 + len(planned.plan.samplers) + (_BATCHES if usable else 0)) as bar:
        counted = _counted(parameters, planned, runner, bar)
        batches = []
        for batch in batches_of(runner) if usable else ():
            bar.advance(1, part=f"the largest {batch.parameter}")
            batches.append(largest(batch, usable))
        bar.complete()
    return plan_of(counted, card, batches)


def _counted(config: Parameters, planned: PlannedModel, runner: DryRunner, bar: Bar) -> Counted:
    bar.advance(0, part="a step")
    step, evaluation = runner.step(), {}
    for name, sampler in planned.plan.samplers.items():
        bar.advance(1, part=f"the evaluation, {name}")
        evaluation[name] = runner.evaluation(sampler, config.evaluation.batch_size)
    in_training = -(-config.evaluation.prompts // config.distributed.processes)
    part = None
    if in_training < config.evaluation.batch_size:
        bar.advance(1, part="an evaluation while training")
        part = Part(images=in_training, meter=runner.evaluation(planned.plan.samplers["stock"], in_training))
    return Counted(
        config=config,
        planned=planned,
        networks=runner.networks(),
        weights=runner.weights,
        step=step,
        evaluation=evaluation,
        part=part,
        trained=sum(p.numel() for own in runner.trainer.modules.values() for p in own.parameters),
    )


def _with_growing_cache(config: Parameters) -> Parameters:
    """A static one is as large as this one is in the end, and counted as it is; a graph's time nobody has measured."""
    return config.model_copy(update={"policy": config.policy.model_copy(update={"kv_cache": "growing"})})


def _share_of_one_card(config: Parameters, modules: tuple[str, ...]) -> Parameters:
    """The prompts of a step that each card takes: whole groups, the largest share."""
    count = config.distributed.processes

    def share(prompts: int, where: str) -> int:
        if count > prompts:
            raise UserError(
                f"distributed.processes is {count}, but {where} is {prompts}: a card takes whole groups. At most"
                f" {prompts} cards have something to do."
            )
        return -(-prompts // count)

    for module in modules:
        share(config.grpo_of(module).prompts_per_step, "grpo.prompts_per_step")
    own = {
        name: module.model_copy(update={"prompts_per_step": share(module.prompts_per_step, f"modules.{name}")})
        if module.prompts_per_step is not None and name in modules
        else module
        for name, module in config.modules.items()
    }
    grpo: GRPOConfig = config.grpo.model_copy(update={"prompts_per_step": -(-config.grpo.prompts_per_step // count)})
    return config.model_copy(update={"grpo": grpo, "modules": own})
