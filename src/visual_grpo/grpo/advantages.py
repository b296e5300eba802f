"""Group-relative advantages: how much better a sample is than the others of its prompt.

Shapes: B rows in group-major order (N prompts x G samples); rewards and advantages are [B] float32. A reward of NaN
marks an unscored sample: it is left out of every mean and its advantage is 0 (DeepSeekMath, arXiv 2402.03300, section
4.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from visual_grpo.common.types import Scores
from visual_grpo.config import GRPOConfig

Scale = Literal["group", "batch", "batch_centred", "none"]
USUAL_CLIP = 5.0
"""Largest absolute advantage, in standard deviations. Undivided advantages are not clipped, as in Dr. GRPO, but
for the losses nft and awm."""


def group_advantages(
    rewards: Tensor,
    group_size: int,
    *,
    scale: Scale = "group",
    epsilon: float = 1e-4,
    clip: float | None = USUAL_CLIP,
) -> Tensor:
    """Rewards relative to their group's mean, ``(r - mean) / (std + epsilon)``, [B] -> [B].

    ``scale`` chooses the standard deviation that divides:

    - ``group``: of the group's rewards (GRPO);
    - ``batch``: of all raw rewards of the batch, as TRL's ``scale_rewards="batch"`` and flow_grpo's ``global_std``
      (which divides the sum of squares by B, not by B - 1). It includes how prompts differ in difficulty;
    - ``batch_centred``: of all rewards less their group's mean, as GDPO takes it. It does not;
    - ``none``: no division (Dr. GRPO, arXiv 2503.20783).

    ``epsilon`` is in units of reward. A group whose scored rewards are all equal gets exactly 0. The result is clamped
    to [-clip, clip].
    """
    groups = _as_groups(rewards, group_size)
    scored = ~groups.isnan()
    counts = scored.sum(1, keepdim=True)
    values = groups.nan_to_num(0.0)
    means = values.sum(1, keepdim=True) / counts.clamp(min=1)
    centred = torch.where(scored & ~_constant(groups)[:, None], values - means, 0.0)
    if scale == "group":
        deviation = (centred.square().sum(1, keepdim=True) / (counts - 1).clamp(min=1)).sqrt()
        centred = centred / (deviation + epsilon)
    elif scale == "batch":
        raw = groups[scored]
        centred = centred / ((raw.std() if len(raw) > 1 else 0.0) + epsilon)
    elif scale == "batch_centred":
        deviation = (centred.square().sum() / (scored.sum() - 1).clamp(min=1)).sqrt()
        centred = centred / (deviation + epsilon)
    if clip is not None:
        centred = centred.clamp(-clip, clip)
    return centred.reshape(-1)


def combined_rewards(scores: Scores, config: GRPOConfig) -> Tensor:
    """Returns what advantages use, [B]: the weighted sum, or with ``combine=gdpo`` the sum of `gdpo_rewards`."""
    if config.combine == "sum":
        return scores.total
    return gdpo_rewards(scores.rewards, scores.weights, config.group_size, epsilon=config.advantage_epsilon)


def gdpo_rewards(
    rewards: Mapping[str, Tensor], weights: Mapping[str, float], group_size: int, *, epsilon: float = 1e-4
) -> Tensor:
    """Each reward normalised in its group, then weighted and summed (GDPO).

    With a plain weighted sum a reward of large variance drowns the other rewards; here each contributes by its weight
    alone (arXiv 2601.05242). ``rewards`` are [B]; a row that any weighted reward leaves unscored gets NaN and counts in
    no normalisation. Returns [B].
    """
    used, unscored = used_rewards(rewards, weights)
    total = torch.zeros_like(unscored, dtype=torch.float32)
    for name in used:
        scored = rewards[name].masked_fill(unscored, torch.nan)
        total = total + weights[name] * group_advantages(scored, group_size, epsilon=epsilon, clip=None)
    return total.masked_fill(unscored, torch.nan)


def zero_variance_groups(rewards: Tensor, group_size: int) -> Tensor:
    """[N] bool: True for groups whose scored rewards do not differ and so teach nothing."""
    return _constant(_as_groups(rewards, group_size))


def zero_variance_share(rewards: Tensor, group_size: int) -> float:
    """Share of `zero_variance_groups` among the groups that have a score; NaN without one."""
    groups = _as_groups(rewards, group_size)
    return float(_constant(groups[~groups.isnan().all(1)]).float().mean())


def used_rewards(rewards: Mapping[str, Tensor], weights: Mapping[str, float]) -> tuple[list[str], Tensor]:
    """Names of the rewards with a weight, and [B] bool: rows that one of them leaves unscored."""
    used = [name for name, weight in weights.items() if weight]
    return used, torch.stack([rewards[name].isnan() for name in used]).any(0)


def _as_groups(rewards: Tensor, group_size: int) -> Tensor:
    if rewards.ndim != 1 or len(rewards) % group_size:
        raise ValueError(f"expected [N * {group_size}] rewards in group-major order, got shape {tuple(rewards.shape)}")
    return rewards.float().view(-1, group_size)


def _constant(groups: Tensor) -> Tensor:
    """[N, G] -> [N] bool, comparing values themselves: a mean of equal floats may be off by an ulp."""
    low = groups.nan_to_num(torch.inf).amin(1)
    high = groups.nan_to_num(-torch.inf).amax(1)
    return low >= high
