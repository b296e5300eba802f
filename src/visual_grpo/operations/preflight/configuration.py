"""Checks that model, rewards and device of a configuration are there and fit together."""

from __future__ import annotations

from collections.abc import Sequence

from visual_grpo.common.errors import Problems, UserError, counted
from visual_grpo.config import Parameters


def check(config: Parameters, *, scores: bool = True) -> None:
    """Raises UserError with all that is missing or does not fit; loads no model.

    Args:
        scores: anything will be scored, so that what the rewards need must be on this machine.
    """
    from visual_grpo.common.device import require_bitsandbytes, resolve_device
    from visual_grpo.training import components

    problems = Problems()
    modules: tuple[str, ...] = ()
    with problems.collect():
        check_model(config)
        modules = components.make_run_spec(config).modules
        _check_processes(config, modules)
    _check_rewards(config, modules, problems, scores)
    with problems.collect():
        if config.grpo.optimizer != "adamw":
            require_bitsandbytes("grpo.optimizer", config.grpo.optimizer)
    with problems.collect():
        resolve_device(config.model.device)
        components.require_gpus(config)
    problems.raise_if_any()


def check_model(config: Parameters) -> None:
    """Raises UserError where the starter cannot make the model, or its folder holds none, or the library for
    ``model.base_weights`` is missing; loads no model."""
    from visual_grpo.training import components

    if config.model.base_weights != "full":
        from visual_grpo.common.device import require_bitsandbytes

        require_bitsandbytes("model.base_weights", config.model.base_weights)
    if config.model.path is None:
        from visual_grpo.starter.build import check_starter

        check_starter(config.starter.world, components.family_of(config).name)
        return
    from visual_grpo.common.digests import may_be_hub_id
    from visual_grpo.models.loading import saved_class

    # A hub id of a named family is not looked up: that would need the network before it is used.
    if not may_be_hub_id(config.model.path):
        saved_class(config.model.path)


def _check_processes(config: Parameters, modules: Sequence[str]) -> None:
    count = config.distributed.processes
    prompts, module = min((config.grpo_of(module).prompts_per_step, module) for module in modules)
    if count > prompts:
        raise UserError(
            f"distributed.processes is {count}, but a step of {module} has {counted(prompts, 'prompt')}"
            " (grpo.prompts_per_step): the samples of a prompt stay in one process, so that more would have nothing to"
            f" do. Expected at most {prompts}."
        )


def _check_rewards(config: Parameters, modules: Sequence[str], problems: Problems, scores: bool) -> None:
    """Notes every reward that cannot be made; for each module there must be one to optimise."""
    from visual_grpo.rewards.catalogue import build_reward
    from visual_grpo.training import components

    before = len(problems.texts)
    for name, reward in config.rewards.items():
        with problems.collect():
            made = build_reward(name, reward)
            if scores:
                made.check_machine()
    with problems.collect():
        _check_gates(config, modules)
    if config.reward == "auto" or len(problems.texts) > before:
        return
    for module in modules:
        with problems.collect():
            components.build_scorer(config, [module])


def _check_gates(config: Parameters, modules: Sequence[str]) -> None:
    """A reward of both signs has no worst score for all modules, and both are judged together."""
    for name in (name for name, reward in config.rewards.items() if reward.only_where):
        weights = {module: config.weights([module])[name] for module in modules}
        if min(weights.values(), default=0.0) < 0 < max(weights.values(), default=0.0):
            raise UserError(
                f"rewards.{name}.only_where: where the others are not satisfied, the reward counts as its worst, which"
                f" is another one by the weights of each module: {', '.join(f'{m} {w:g}' for m, w in weights.items())}."
                " Expected weights of one sign; or name the function twice, as two rewards"
            )
