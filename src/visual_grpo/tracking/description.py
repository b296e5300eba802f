"""A run's name, from what tells it apart, and its description in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from visual_grpo.config import Parameters
from visual_grpo.config.outputs import FLOW
from visual_grpo.config.presets import WORLD_PRESETS
from visual_grpo.errors import counted

_IN_THE_NAME = {
    *("seed", "train.seed", "resume", "output", "adapter", "data.path"),
    *("grpo.loss", "grpo.steps", "grpo.learning_rate", "policy.train", "policy.stages"),
}
_NOT_IN_THE_NAME = (
    *("evaluation.", "promotion.", "reproduce.", "tracking."),
    *("policy.signal_check.", "model.device", "model.threads"),
)
"""Parameters that change nothing of what is trained."""
_MOST_CHANGES = 3


def training_name(
    config: Parameters, modules: Sequence[str], environment: str | None, changed: Mapping[str, Any]
) -> str:
    """For example ``ar+dit grpo lr7e-4+6e-4 80 steps seed 0`` (a learning rate of each module).

    Args:
        environment: Kedro's; None = the default one.
        changed: parameters given with ``--params``, by their dotted names; those that the name lacks follow it.
    """
    words = [
        environment or "",
        *_own_data(config),
        "+".join(modules),
        "joint" if config.policy.stages == "joint" and len(modules) > 1 else "",
        config.grpo.loss,
        "lr" + "+".join(_distinct(_short(config.grpo_of(module).learning_rate) for module in modules)),
        counted(config.grpo.steps, "step"),
        f"seed {config.training_seed}",
        *_changes(config, modules, environment, changed),
    ]
    return " ".join(word for word in words if word)


def other_name(
    config: Parameters, pipelines: Sequence[str], environment: str | None, changed: Mapping[str, Any]
) -> str:
    """Of a run that trains nothing, for example ``baseline seed 0``; Kedro has the pipelines in any order."""
    words = [
        environment or "",
        *_own_data(config),
        "+".join(_in_their_order(pipelines)),
        f"seed {config.seed}",
        *_changes(config, (), environment, changed),
    ]
    return " ".join(word for word in words if word)


def ended_name(name: str, how: Literal["failed", "stopped"]) -> str:
    """Of a training that ended before its first step, and so has no adapter."""
    return f"{name} ({how} before step 1)"


def resumed_name(name: str, steps: int) -> str:
    """Of a training that goes on to ``steps``. What else the name says stays: also words that the user put there."""
    started = re.sub(r" \(\w+ before step 1\)$", "", name)
    return re.sub(r"\b\d+ steps?\b", counted(steps, "step"), started)


def in_words(config: Parameters, modules: Sequence[str], commands: str) -> str:
    """What a training run does, in Markdown, for MLflow's description.

    Args:
        commands: the line that started it, and those that resumed it.
    """
    weights = {name: weight for name, weight in config.weights(modules).items() if weight}
    rewards = ", ".join(f"{name} (weight {weight:g})" for name, weight in weights.items())
    grpo = config.grpo_of(modules[0])
    return (
        f"GRPO (loss `{config.grpo.loss}`) of {' and '.join(modules)} of `{config.model.path or config.starter.model}`,"
        f" LoRA rank {config.lora_of(modules[0]).rank}.\n\n"
        f"- data: `{config.data.path}` ({config.data.task}, {config.data.width} x {config.data.height} pixels)\n"
        f"- optimised: {rewards or 'nothing'}\n"
        f"- {counted(config.grpo.steps, 'step')} of {counted(grpo.prompts_per_step, 'prompt')} x"
        f" {counted(grpo.group_size, 'sample')}, learning rate"
        f" {', '.join(f'{config.grpo_of(module).learning_rate:g} ({module})' for module in modules)},"
        f" seed {config.training_seed}\n\n"
        f"```\n{commands}\n```"
    )


def _in_their_order(pipelines: Sequence[str]) -> list[str]:
    """As data flows through them; those beside the flow follow."""
    beside = sorted(set(pipelines) - set(FLOW))
    return [name for name in FLOW if name in pipelines] + beside


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _own_data(config: Parameters) -> list[str]:
    return [] if config.data.path == config.starter.dataset else [Path(config.data.path).name]


def _changes(
    config: Parameters, modules: Sequence[str], environment: str | None, changed: Mapping[str, Any]
) -> list[str]:
    """The rewards, where they are not the usual ones, and other parameters that were given."""
    given = {name for name in changed if _is_of_rewards(name)}
    # The rewards that a named environment configures are not repeated: the run's name has the environment's name.
    if not (given if environment else _optimised(config, modules) != _optimised(_with_usual_rewards(config), modules)):
        return _others(changed)
    weights = {name: weight for name, (weight, _, _) in _optimised(config, modules).items()}
    shown = [name if weight == 1 else f"{name} {weight:g}" for name, weight in weights.items()]
    return [
        "rewards " + ", ".join(_first(shown)),
        *_others({name: value for name, value in changed.items() if name not in given}),
    ]


def _is_of_rewards(name: str) -> bool:
    return name.split(".")[0] in ("reward", "rewards") or (name.startswith("modules.") and ".rewards." in name)


def _optimised(config: Parameters | None, modules: Sequence[str]) -> dict[str, tuple[float, str | None, object]]:
    """What of each reward decides the training: weight, function and options."""
    if config is None:
        return {}
    weights = config.weights(modules) if modules else {name: reward.weight for name, reward in config.rewards.items()}
    return {
        name: (weights[name], reward.function, reward.options)
        for name, reward in config.rewards.items()
        if weights[name]
    }


def _with_usual_rewards(config: Parameters) -> Parameters | None:
    """As if no reward was set: those of the drawn world, or of the preset that the records decide; None without any."""
    preset = WORLD_PRESETS.get(config.starter.world) if config.data_is_drawn else config.reward
    if preset is None:
        return None
    tree = config.model_dump()
    modules = {name: {**section, "rewards": {}} for name, section in tree["modules"].items()}
    return Parameters.model_validate({**tree, "reward": preset, "rewards": {}, "modules": modules})


def _others(changed: Mapping[str, Any]) -> list[str]:
    named = {name: value for name, value in changed.items() if not name.startswith(_NOT_IN_THE_NAME)}
    named = {name: value for name, value in named.items() if not name.endswith(".learning_rate")}
    extra = [f"{name}={value}" for name, value in named.items() if name not in _IN_THE_NAME]
    return _first(extra)


def _first(texts: list[str]) -> list[str]:
    return texts[:_MOST_CHANGES] + (["..."] if len(texts) > _MOST_CHANGES else [])


def _short(number: float) -> str:
    """0.0007 -> 7e-4."""
    mantissa, exponent = f"{number:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"
