"""Names what limited a training, from its curves: one sentence with the parameter to look at."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from visual_grpo.config import ModuleConfig
from visual_grpo.evaluation.plots import columns_of

FEWEST_STEPS = 12
"""Steps of a training whose curves can say something."""
_EQUAL, _CLIPPED, _HELD = 0.7, 0.3, 0.5
"""Shares above which groups with equal rewards and clipped decisions are too many, and below which the highest learning
rate used is not the one given."""


Settings = Mapping[str, Mapping[str, tuple[str, Any]]]
"""Module, ``all`` if there is one only -> name -> the parameter that gives the setting, and its value."""
Finding = Callable[[pd.DataFrame, Settings], str | None]


def limit_notes(history: pd.DataFrame, parameters: Mapping[str, Any], modules: Sequence[str]) -> list[str]:
    """Returns a sentence on the first limit in the order of `_FINDINGS`; empty where the curves show none.

    ``history`` has a row of metrics for each step; ``parameters`` are the training's, as a tree; empty = not known;
    ``modules`` are the trained ones.
    """
    if len(history) < FEWEST_STEPS or not parameters:
        return []
    settings = {module if len(modules) > 1 else "all": _settings_of(module, parameters) for module in modules}
    found = (finding(history, settings) for finding in _FINDINGS)
    return [f"What limited the training: {sentence}." for sentence in found if sentence is not None][:1]


def _settings_of(module: str, parameters: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    own = ModuleConfig.model_construct(**parameters.get("modules", {}).get(module) or {}).grpo()
    sections = (("grpo", parameters["grpo"]), (f"modules.{module}", own))
    return {name: (f"{section}.{name}", value) for section, values in sections for name, value in values.items()}


def _eval_falls(history: pd.DataFrame, settings: Settings) -> str | None:
    if "eval/total" not in history:
        return None
    judged = history[["step", "eval/total"]].dropna()
    if len(judged) < 3:
        return None
    steps, scores = judged["step"].to_numpy(), judged["eval/total"].to_numpy()
    best = int(scores.argmax())
    since = history.loc[history["step"] > steps[best], "reward/total"]
    half, noise, spread = (len(since) + 1) // 2, _noise(history["reward/total"]), np.abs(np.diff(scores)).mean()
    if scores[-1] >= scores[best] - spread or not _is_above(since.tail(half), since.head(half), noise):
        return None
    return (
        f"the eval prompts fell from {scores[best]:.3g} at step {steps[best]:.0f} to {scores[-1]:.3g}, while the reward"
        " of the training samples rose, so it learned what does not carry over: let sampling.rollout agree with"
        f" sampling.eval, or stay nearer to the base model ({_named(settings, 'kl_weight')})"
    )


def _collapses(history: pd.DataFrame, settings: Settings) -> str | None:
    reward, window = history["reward/total"], max(3, len(history) // 10)
    smooth = reward.rolling(window).mean().to_numpy()
    peak = int(np.nanargmax(smooth))
    top, end = smooth[peak], smooth[-1]
    # The highest of many noisy means is above the truth.
    if top - end < max(5 * _noise(reward) / math.sqrt(window), 0.1 * (top - np.nanmin(smooth))):
        return None
    return (
        f"the reward fell from {top:.3g} around step {history['step'].iloc[peak]:.0f} to {end:.3g} at the end, as after"
        f" steps that are too large: lower {_step_sizes(settings)}{_or_set_a_target(settings)}"
    )


def _equal_groups(history: pd.DataFrame, settings: Settings) -> str | None:
    for module, column in columns_of(history, "zero_variance_share").items():
        if (share := _late(history[column])) > _EQUAL:
            return (
                f"in the second half, {share:.0%} of the scored groups{_of(module)} (the samples of one prompt) had"
                f" equal rewards, which teach nothing: raise {settings[module]['group_size'][0]} or grpo.max_refills,"
                " or use a finer reward"
            )
    return None


def _clipped(history: pd.DataFrame, settings: Settings) -> str | None:
    for module, column in columns_of(history, "clip_fraction").items():
        of = settings[module]
        narrow = of["loss"][1] == "gspo"  # Such clips cut many ratios by design.
        if (share := _late(history[column])) > _CLIPPED and not narrow:
            own, masks = {module: of}, of["loss"][1] == "dppo"
            return (
                f"in the second half, {share:.0%} of the decisions{_of(module)} lost their gradient to"
                f" {'grpo.divergence_limit' if masks else 'the clip'}: lower {of['updates_per_rollout'][0]} or"
                f" {_step_sizes(own)}{_or_set_a_target(own)}"
            )
    return None


def _held(history: pd.DataFrame, settings: Settings) -> str | None:
    for module, column in columns_of(history, "learning_rate").items():
        (_, rate), (name, target) = settings[module]["learning_rate"], settings[module]["target_kl"]
        share = history[column].max() / rate  # Of the peak, which every schedule has.
        if target is not None and share < _HELD:
            return (
                f"{name} ({target:g}) held the steps{_of(module)} at {share:.0%} of the learning rate: if the reward"
                " still rises, raise the target"
            )
    return None


def _is_noise(history: pd.DataFrame, settings: Settings) -> str | None:
    reward = history["reward/total"]  # A fast learner has all of it before the first third is over.
    first, last, noise = reward.head(max(3, len(reward) // 10)), reward.tail(len(reward) // 3), _noise(reward)
    if _is_above(last, first, noise):
        return None
    return (
        f"the reward did not rise above its noise ({first.mean():.3g} in the first {len(first)} steps,"
        f" {last.mean():.3g} in the last third, {noise:.2g} from step to step): raise grpo.steps,"
        f" {_named(settings, 'prompts_per_step')}, {_named(settings, 'group_size')} or {_step_sizes(settings)}"
    )


_FINDINGS: tuple[Finding, ...] = (_eval_falls, _collapses, _equal_groups, _clipped, _is_noise, _held)


def _named(settings: Settings, name: str) -> str:
    return " or ".join(dict.fromkeys(of[name][0] for of in settings.values()))


def _step_sizes(settings: Settings) -> str:
    """The parameters that give the modules their step size: the target KL where there is one."""
    sizes = [of["target_kl"] if of["target_kl"][1] is not None else of["learning_rate"] for of in settings.values()]
    return " or ".join(dict.fromkeys(f"{name} ({value:g})" for name, value in sizes))


def _or_set_a_target(settings: Settings) -> str:
    free = [of["target_kl"][0] for of in settings.values() if of["target_kl"][1] is None]
    return f", or set {' or '.join(dict.fromkeys(free))}" if free else ""


def _of(module: str) -> str:
    return "" if module == "all" else f" of {module}"


def _late(values: pd.Series) -> float:
    """Mean over the second half; NaN without a value."""
    return float(values.tail(len(values) // 2).mean())


def _noise(reward: pd.Series) -> float:
    """Standard deviation of a step's mean reward around its trend, from the differences of neighbours."""
    return float(reward.diff().std()) / math.sqrt(2)


def _is_above(later: pd.Series, earlier: pd.Series, noise: float) -> bool:
    """Returns whether the mean is higher by two standard errors; ``noise`` is a step's deviation."""
    return float(later.mean() - earlier.mean()) > 2 * noise * math.sqrt(1 / len(later) + 1 / len(earlier))
