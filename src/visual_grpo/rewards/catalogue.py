"""The built-in rewards by name, and what their names alone say: no reward's libraries are imported."""

from __future__ import annotations

import sys

from visual_grpo.common.errors import UserError
from visual_grpo.common.importing import load_attribute

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

_BY_SERVERS = "visual_grpo.rewards.remote."
TRANSPORT = frozenset({"timeout", "deadline", "retries", "concurrency", "stop_after", "api_key"})
"""Options of the rewards that a server computes which cannot affect a score."""


def is_negative_points(name: str, function: str | None) -> bool:
    return (function or BUILT_IN.get(name)) == BUILT_IN["negative_points"]


def transport_of(name: str, function: str | None) -> frozenset[str]:
    """Returns the options that cannot affect a score, such as a timeout.

    Nothing is imported: a function's name may come from a stranger's provenance, whose code a comparison must not run.
    A function that is not imported yet has no such options.
    """
    path = function or BUILT_IN.get(name, "")
    if path.startswith(_BY_SERVERS):
        return TRANSPORT
    if path.partition(":")[0] not in sys.modules:
        return frozenset()
    try:
        return frozenset(getattr(load_attribute(path, f"rewards.{name}.function"), "transport", ()))
    except UserError:
        return frozenset()
