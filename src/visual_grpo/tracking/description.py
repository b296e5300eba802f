"""What MLflow shows of a run: its name, its description in words, and the metrics to compare runs by."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from visual_grpo.config import Parameters
from visual_grpo.config.outputs import FLOW
from visual_grpo.errors import counted

_NAMED = {
    *("seed", "train.seed", "resume", "output", "adapter", "data.path"),
    *("grpo.loss", "grpo.steps", "grpo.learning_rate", "policy.train", "policy.stages"),
}
_MOST_CHANGES = 3
_OF_MODULE = (
    r"reward/total(_std)?|reward/unscored_share|zero_variance_share|advantage/abs_mean|kl|entropy|approx_kl"
    r"|clip_fraction|ratio/first_max_abs_log|sampler_gap/(?:mean|max)|grad_norm|learning_rate|updates_left_out"
    r"|speed/samples_per_second"
)
_OF_RUN = r"eval/.+|watch/.+|samples|seconds/step|memory_gb"


def training_name(
    config: Parameters, modules: Sequence[str], environment: str | None, changed: Mapping[str, Any]
) -> str:
    """For example ``ar+dit grpo lr7e-4+6e-4 80 steps seed 0`` (a learning rate of each module).

    Args:
        environment: Kedro's; None = the default one.
        changed: parameters given with ``--params``, by their dotted names; those that the name lacks follow it.
    """
    rates = dict.fromkeys(_short(config.grpo_of(module).learning_rate) for module in modules)
    joint = ["joint"] if config.policy.stages == "joint" and len(modules) > 1 else []
    what = ["+".join(modules), *joint, config.grpo.loss, f"lr{'+'.join(rates)}", counted(config.grpo.steps, "step")]
    return _name(config, what, config.training_seed, environment, changed)


def other_name(
    config: Parameters, pipelines: Sequence[str], environment: str | None, changed: Mapping[str, Any]
) -> str:
    """The name of a run that trains nothing, for example ``baseline seed 0``; pipelines in the order of the data."""
    ordered = [name for name in FLOW if name in pipelines] + sorted(set(pipelines) - set(FLOW))
    return _name(config, ["+".join(ordered)], config.seed, environment, changed)


def _name(
    config: Parameters, what: Sequence[str], seed: int, environment: str | None, changed: Mapping[str, Any]
) -> str:
    own_data = [] if config.data.path == config.starter.dataset else [Path(config.data.path).name]
    others = [
        f"{name}={value}"
        for name, value in changed.items()
        if name not in _NAMED and not name.endswith(".learning_rate")
    ]
    more = ["..."] if len(others) > _MOST_CHANGES else []
    start = [] if environment is None else [environment]
    return " ".join([*start, *own_data, *what, f"seed {seed}", *others[:_MOST_CHANGES], *more])


def resumed_name(name: str, steps: int) -> str:
    """The name of a training that goes on to ``steps``. What else it says stays: also words that the user put there."""
    return re.sub(r"\b\d+ steps?\b", counted(steps, "step"), name)


def in_words(config: Parameters, modules: Sequence[str], commands: str) -> str:
    """What a training run does, in Markdown, for MLflow's description.

    Args:
        commands: the line that started it, and those that resumed it.
    """
    weights = {name: weight for name, weight in config.weights(modules).items() if weight}
    rewards = ", ".join(f"{name} (weight {weight:g})" for name, weight in weights.items())
    rates = ", ".join(f"{config.grpo_of(module).learning_rate:g} ({module})" for module in modules)
    grpo, data = config.grpo_of(modules[0]), config.data
    return (
        f"GRPO (loss `{config.grpo.loss}`) of {' and '.join(modules)} of `{config.model.path or config.starter.model}`,"
        f" LoRA rank {config.lora_of(modules[0]).rank}.\n\n"
        f"- data: `{data.path}` ({data.task}, {data.width} x {data.height} pixels)\n"
        f"- optimised: {rewards or 'nothing'}\n"
        f"- {counted(config.grpo.steps, 'step')} of {counted(grpo.prompts_per_step, 'prompt')} x"
        f" {counted(grpo.group_size, 'sample')}, learning rate {rates}, seed {config.training_seed}\n\n"
        f"```\n{commands}\n```"
    )


def tracked(row: Mapping[str, float], modules: tuple[str, ...], rewards: tuple[str, ...]) -> dict[str, float]:
    """The metrics of a row of ``training.csv`` that MLflow shows: those to compare runs by.

    Args:
        row: with several modules each has metrics under ``NAME/``.
        modules: the trained ones.
        rewards: all of them; those of weight 0 are guards, to be watched beside the total.
    """
    own = "|".join([_OF_MODULE, *(rf"reward/{re.escape(name)}" for name in rewards)])
    prefix = f"({'|'.join(map(re.escape, modules))})/" if len(modules) > 1 else ""
    wanted = re.compile(rf"{prefix}({own})|reward/total|{_OF_RUN}")
    return {name: value for name, value in row.items() if wanted.fullmatch(name)}


def result_metrics(found: Mapping[str, Any]) -> dict[str, float]:
    """The headline of an evaluation (`evaluation.headline.headline`) as metrics; what is undefined is left out.

    ``result/gain``: trained minus base on the held-out total at the stock sampler, ``low`` and ``high`` its interval;
    ``unscored`` and ``unscored_base``: numbers of samples that no judge could score; ``gain_over_control``: against the
    base model at its best cheap setting; and the task's own measure under its name.
    """
    task, control = found["task"], found["control"]
    metrics = {
        "gain": found["difference"],
        "low": found["ci_low"],
        "high": found["ci_high"],
        "base": found["baseline"],
        "trained": found["trained"],
        "unscored": found["unscored"]["trained"],
        "unscored_base": found["unscored"]["baseline"],
    }
    if control:
        metrics |= {"gain_over_control": control["difference"], "low_over_control": control["ci_low"]}
    if task:
        metrics |= {task["name"]: task["trained"], f"{task['name']} base": task["baseline"]}
    return {f"result/{name}": float(value) for name, value in metrics.items() if value is not None}


def _short(number: float) -> str:
    """0.0007 -> 7e-4."""
    mantissa, exponent = f"{number:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"
