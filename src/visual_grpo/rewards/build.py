"""Builds rewards: built-in ones by name, custom ones from ``package.module:function``."""

from __future__ import annotations

from collections.abc import Mapping

from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.config import RewardConfig
from visual_grpo.rewards.catalogue import BUILT_IN, is_negative_points
from visual_grpo.rewards.combine import ClipAndConditions, RewardSet
from visual_grpo.rewards.frames import PerFrame
from visual_grpo.rewards.outputs import FailureBudget
from visual_grpo.rewards.reward import FunctionReward, make_reward


def build_reward(name: str, config: RewardConfig) -> FunctionReward:
    """Builds the reward ``name`` from ``config.function`` if given, else the built-in reward of that name."""
    path = config.function or BUILT_IN.get(name)
    if path is None:
        raise UserError(
            f"no built-in reward {name!r}.{nearest_hint(name, BUILT_IN)} Built in: {', '.join(BUILT_IN)}."
            f" For your own reward, set rewards.{name}.function: package.module:function"
        )
    reward = make_reward(name, path, config.options)
    if config.frames is not None:
        reward = FunctionReward(name, PerFrame(name, reward.function, config.frames, config.over_frames))
    reward.budget = FailureBudget(config.max_failed_share)
    reward.judge_of = (config.judge_of or "total") if config.judge else None
    return reward


def negative_points(rewards: Mapping[str, RewardConfig]) -> FunctionReward | None:
    """Builds the reward whose segmenter turns answers into masks and pictures; None if none of the rewards is one."""
    chosen = (name for name, reward in rewards.items() if is_negative_points(name, reward.function))
    return next((build_reward(name, rewards[name]) for name in chosen), None)


def build_reward_set(rewards: Mapping[str, RewardConfig], weights: Mapping[str, float]) -> RewardSet:
    """Builds all configured rewards with their weights, in the order of the configuration."""
    return RewardSet(
        {name: (build_reward(name, config), weights[name]) for name, config in rewards.items()},
        {name: ClipAndConditions(clip=config.clip, only_where=config.only_where) for name, config in rewards.items()},
    )


def reward_commits(rewards: Mapping[str, RewardConfig]) -> dict[str, dict[str, str]]:
    """Returns reward -> option -> commit for the rewards whose weights are on the hub."""
    commits = {name: build_reward(name, reward).commits() for name, reward in rewards.items()}
    return {name: by_option for name, by_option in commits.items() if by_option}
