"""What rewards are made of beside their parameters: the user's own code, files that options name, weights on a hub."""

from __future__ import annotations

from collections.abc import Mapping

from visual_grpo.config import RewardConfig
from visual_grpo.importing import code_digests
from visual_grpo.option_files import option_files
from visual_grpo.trained_adapters import CODE, COMMIT, FILE


def reward_digests(rewards: Mapping[str, RewardConfig], output: str) -> dict[str, str]:
    """What a training's facts have: ``code of reward NAME`` and ``file of reward NAME: OPTION`` -> 12 hex digits, and
    ``commit of reward NAME: OPTION`` -> the commit on the hub."""
    codes = code_digests({name: reward.function for name, reward in rewards.items()})
    files = {
        f"{FILE}{name}: {option}": digest
        for name, reward in rewards.items()
        for option, digest in option_files(reward.options, output).items()
    }
    commits = {
        f"{COMMIT}{name}: {option}": commit
        for name, own in reward_commits(rewards).items()
        for option, commit in own.items()
    }
    return {**{f"{CODE}{name}": digest for name, digest in codes.items()}, **files, **commits}


def reward_commits(rewards: Mapping[str, RewardConfig]) -> dict[str, dict[str, str]]:
    """Reward -> option -> commit, of the rewards whose weights are files of a hub: others there, and scores change."""
    from visual_grpo.rewards.catalogue import build_reward

    found = {name: build_reward(name, reward).commits() for name, reward in rewards.items()}
    return {name: own for name, own in found.items() if own}
