"""What MLflow shows of a run: its name, and the metrics to compare runs by."""

from __future__ import annotations

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
_OF_MODULE = {
    *("reward/total", "reward/total_std", "reward/unscored_share", "zero_variance_share", "advantage/abs_mean"),
    *("kl", "entropy", "approx_kl", "clip_fraction", "ratio/first_max_abs_log", "sampler_gap/mean", "sampler_gap/max"),
    *("grad_norm", "learning_rate", "updates_skipped", "speed/samples_per_second"),
}
_OF_RUN = {"reward/total", "samples", "seconds/step", "memory_gb"}


def run_name(
    config: Parameters,
    modules: Sequence[str],
    pipelines: Sequence[str],
    environment: str | None,
    changed: Mapping[str, Any],
) -> str:
    """For example ``ar+dit grpo lr7e-4+6e-4 80 steps seed 0``, or ``baseline seed 0`` for a run that trains nothing.

    Args:
        modules: those that are trained, each with its learning rate; () = none.
        environment: Kedro's; None = the default one.
        changed: parameters given with ``--params``, by their dotted names; those that the name lacks follow it.
    """
    if modules:
        rates = dict.fromkeys(_short(config.grpo_of(module).learning_rate) for module in modules)
        joint = ["joint"] if config.policy.stages == "joint" and len(modules) > 1 else []
        steps = counted(config.grpo.steps, "step")
        what, seed = ["+".join(modules), *joint, config.grpo.loss, f"lr{'+'.join(rates)}", steps], config.training_seed
    else:
        ordered = [name for name in FLOW if name in pipelines] + sorted(set(pipelines) - set(FLOW))
        what, seed = ["+".join(ordered)], config.seed
    start = [] if environment is None else [environment]
    own_data = [] if config.data.path == config.starter.dataset else [Path(config.data.path).name]
    others = [
        f"{name}={value}"
        for name, value in changed.items()
        if name not in _NAMED and not name.endswith(".learning_rate")
    ]
    more = ["..."] if len(others) > _MOST_CHANGES else []
    return " ".join([*start, *own_data, *what, f"seed {seed}", *others[:_MOST_CHANGES], *more])


def _short(number: float) -> str:
    """0.0007 -> 7e-4."""
    mantissa, exponent = f"{number:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def tracked(row: Mapping[str, float], modules: Sequence[str], rewards: Sequence[str]) -> dict[str, float]:
    """The metrics of a row of ``training.csv`` that MLflow shows: those to compare runs by.

    Args:
        row: with several modules each has metrics under ``NAME/``.
        modules: the trained ones.
        rewards: all of them; those of weight 0 are guards, to be watched beside the total.
    """
    own = _OF_MODULE | {f"reward/{name}" for name in rewards}
    if len(modules) > 1:
        own = {f"{module}/{name}" for module in modules for name in own}
    return {name: value for name, value in row.items() if name in own | _OF_RUN or name.startswith(("eval/", "watch/"))}


def result_metrics(found: Mapping[str, Any]) -> dict[str, float]:
    """The headline of an evaluation (`evaluation.headline.headline`) as metrics; docs/metrics.md explains them."""
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
