"""Names what limited a training, from its curves: one sentence with the parameter to look at."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from visual_grpo.evaluation.plots import columns_of
from visual_grpo.grpo.losses import LOSSES

FEWEST_STEPS = 12
"""Steps of a training whose curves can say something."""
_EQUAL, _CLIPPED, _HELD = 0.7, 0.3, 0.5
"""Shares above which groups with equal rewards and clipped decisions are too many, and below which the highest learning
rate used is not the one given."""

Finding = Callable[[pd.DataFrame, Mapping[str, Any]], str | None]


def limit_notes(history: pd.DataFrame, parameters: Mapping[str, Any]) -> list[str]:
    """Returns a sentence on the first limit in the order of `_FINDINGS`; empty where the curves show none.

    ``history`` has a row of metrics for each step; ``parameters`` are the training's, as a tree; empty = not known.
    """
    if len(history) < FEWEST_STEPS or not parameters:
        return []
    found = (finding(history, parameters) for finding in _FINDINGS)
    return [f"What limited the training: {sentence}." for sentence in found if sentence is not None][:1]


def _eval_falls(history: pd.DataFrame, parameters: Mapping[str, Any]) -> str | None:
    if "eval/total" not in history:
        return None
    judged = history[["step", "eval/total"]].dropna()
    if len(judged) < 3:
        return None
    steps, scores = judged["step"].to_numpy(), judged["eval/total"].to_numpy()
    best = int(scores.argmax())
    since = history.loc[history["step"] > steps[best], "reward/total"]
    before = history.loc[history["step"] <= steps[best], "reward/total"]
    spread = np.abs(np.diff(scores)).mean()
    if scores[-1] >= scores[best] - spread or not _is_above(since, before.tail(len(since))):
        return None
    return (
        f"the eval prompts fell from {scores[best]:.3g} at step {steps[best]:.0f} to {scores[-1]:.3g}, while the reward"
        " of the training samples rose, so it learned what does not carry over: let sampling.rollout agree with"
        " sampling.eval, or stay nearer to the base model (grpo.kl_weight, policy.flow.anchor)"
    )


def _collapses(history: pd.DataFrame, parameters: Mapping[str, Any]) -> str | None:
    reward, window = history["reward/total"], max(3, len(history) // 10)
    smooth = reward.rolling(window).mean().to_numpy()
    peak = int(np.nanargmax(smooth))
    top, end = smooth[peak], smooth[-1]
    # The highest of many noisy means is above the truth.
    if top - end < max(5 * _noise(reward) / math.sqrt(window), 0.1 * abs(top)):
        return None
    target = parameters["grpo"].get("target_kl")
    advice = "set grpo.target_kl" if target is None else f"lower grpo.target_kl ({target:g})"
    return (
        f"the reward fell from {top:.3g} around step {history['step'].iloc[peak]:.0f} to {end:.3g} at the"
        f" end, as after steps that are too large: lower grpo.learning_rate, or {advice}"
    )


def _equal_groups(history: pd.DataFrame, parameters: Mapping[str, Any]) -> str | None:
    for module, column in columns_of(history, "zero_variance_share").items():
        if (share := _late(history[column])) > _EQUAL:
            return (
                f"in the second half, {share:.0%} of the groups{_of(module)} had equal rewards, which teach nothing:"
                " raise grpo.group_size or grpo.max_refills, or use a finer reward"
            )
    return None


def _clipped(history: pd.DataFrame, parameters: Mapping[str, Any]) -> str | None:
    if LOSSES[parameters["grpo"]["loss"]].sequence_ratio:  # Its clips are that narrow.
        return None
    for module, column in columns_of(history, "clip_fraction").items():
        if (share := _late(history[column])) > _CLIPPED:
            return (
                f"in the second half, {share:.0%} of the decisions{_of(module)} lost their gradient to the clip: lower"
                " grpo.updates_per_rollout or grpo.learning_rate, or set grpo.target_kl"
            )
    return None


def _held(history: pd.DataFrame, parameters: Mapping[str, Any]) -> str | None:
    for module, column in columns_of(history, "learning_rate").items():
        own = (parameters.get("modules") or {}).get(module) or {}
        given, target = (own.get(name) or parameters["grpo"].get(name) for name in ("learning_rate", "target_kl"))
        share = history[column].max() / given  # Of the peak, which every schedule has.
        if target is not None and share < _HELD:
            return (
                f"grpo.target_kl ({target:g}) held the steps{_of(module)} at {share:.0%} of the learning rate: if the"
                " reward still rises, raise the target"
            )
    return None


def _is_noise(history: pd.DataFrame, parameters: Mapping[str, Any]) -> str | None:
    reward = history["reward/total"]
    third = len(reward) // 3
    first, last = reward.head(third), reward.tail(third)
    if _is_above(last, first):
        return None
    return (
        f"the reward did not rise above its noise ({first.mean():.3g} in the first third, {last.mean():.3g} in the"
        f" last, {_noise(reward):.2g} from step to step): raise grpo.prompts_per_step or grpo.group_size, grpo.steps"
        " or grpo.learning_rate"
    )


_FINDINGS: tuple[Finding, ...] = (_eval_falls, _collapses, _equal_groups, _clipped, _is_noise, _held)


def _of(module: str) -> str:
    return "" if module == "all" else f" of {module}"


def _late(values: pd.Series) -> float:
    """Mean over the second half; NaN without a value."""
    return float(values.tail(len(values) // 2).mean())


def _noise(reward: pd.Series) -> float:
    """Standard deviation of a step's mean reward around its trend, from the differences of neighbours."""
    return float(reward.diff().std()) / math.sqrt(2)


def _is_above(later: pd.Series, earlier: pd.Series) -> bool:
    """Returns whether the mean is higher by two standard errors."""
    if len(later) < 2 or len(earlier) < 2:
        return False
    error = math.sqrt(later.var() / len(later) + earlier.var() / len(earlier))
    return float(later.mean() - earlier.mean()) > 2 * error
