"""Builds rewards: built-in ones by name, custom ones from ``package.module:function``."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.config import RewardConfig
from visual_grpo.rewards.combine import ClipAndConditions, RewardSet
from visual_grpo.rewards.frames import PerFrame
from visual_grpo.rewards.outputs import FailureBudget
from visual_grpo.rewards.reward import FunctionReward, load_function, make_reward

BUILT_IN = {
    "pixel": "visual_grpo.rewards.target:PixelReward",
    "psnr": "visual_grpo.rewards.target:PsnrReward",
    "ssim": "visual_grpo.rewards.target:SsimReward",
    "ms_ssim": "visual_grpo.rewards.target:MsSsimReward",
    "delta_e": "visual_grpo.rewards.target:DeltaEReward",
    "target_layout": "visual_grpo.rewards.target:TargetLayout",
    "lpips": "visual_grpo.rewards.learned.lpips_similarity:LpipsReward",
    "source_ssim": "visual_grpo.rewards.target:SourceSsim",
    "ocr": "visual_grpo.rewards.ocr:OcrReward",
    "negative_points": "visual_grpo.rewards.negative_points:NegativePointsReward",
    "votes": "visual_grpo.rewards.votes.votes_reward:VotesReward",
    "jpeg_size": "visual_grpo.rewards.guards:JpegSizeReward",
    "clip_score": "visual_grpo.rewards.learned.clip:ClipScore",
    "pick_score": "visual_grpo.rewards.learned.clip:PickScore",
    "aesthetic": "visual_grpo.rewards.learned.clip:Aesthetic",
    "hps": "visual_grpo.rewards.learned.clip:Hps",
    "dino_identity": "visual_grpo.rewards.learned.dino:DinoIdentity",
    "dino_structure": "visual_grpo.rewards.learned.dino:DinoStructure",
    "group_diversity": "visual_grpo.rewards.guards:GroupDiversity",
    "kept_region": "visual_grpo.rewards.target:KeptRegion",
    "object_layout": "visual_grpo.rewards.object_layout:ObjectLayout",
    "edge_density": "visual_grpo.rewards.guards:EdgeDensity",
    "colour_entropy": "visual_grpo.rewards.guards:ColourEntropy",
    "exposure": "visual_grpo.rewards.guards:Exposure",
    "motion": "visual_grpo.rewards.motion:Motion",
    "motion_consistency": "visual_grpo.rewards.motion:MotionConsistency",
    "flicker": "visual_grpo.rewards.motion:Flicker",
    "fine_noise": "visual_grpo.rewards.guards:FineNoise",
    "http": "visual_grpo.rewards.remote.http_reward:HttpReward",
    "vlm_judge": "visual_grpo.rewards.remote.judge:VlmJudge",
}
"""Import paths; a reward's libraries are imported only if it is configured."""


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


def is_negative_points(name: str, function: str | None) -> bool:
    return (function or BUILT_IN.get(name)) == BUILT_IN["negative_points"]


def transport_of(name: str, function: str | None) -> frozenset[str]:
    """Returns the options that cannot affect a score, such as a timeout; none if the reward cannot be loaded.

    Of a function that is not built in, only what is imported already is asked: its name may come from a stranger's
    provenance, whose code a comparison must not run.
    """
    if function is not None and function.partition(":")[0] not in sys.modules:
        return frozenset()
    try:
        return frozenset(getattr(load_function(function or BUILT_IN.get(name, "")), "transport", ()))
    except UserError:
        return frozenset()


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
