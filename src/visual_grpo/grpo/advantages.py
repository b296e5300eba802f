"""Group-relative advantages (DeepSeekMath, arXiv 2402.03300, section 4.1).

Shapes: rewards and advantages are [B] float32 with B = N * G rows in group-major order.
NaN marks an unscored sample: it is left out of every mean and its advantage is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

Scale = Literal["group", "batch", "batch_centred", "none"]


def group_advantages(
    rewards: Tensor,
    group_size: int,
    *,
    scale: Scale = "group",
    epsilon: float = 1e-4,
    clip: float | None = 5.0,
) -> Tensor:
    """Rewards relative to their group's mean, ``(r - mean) / (std + epsilon)``, [B] -> [B].

    ``scale`` chooses the standard deviation that divides:

    - ``group``: that of the group's rewards (GRPO);
    - ``batch``: that of all raw rewards of the batch, as TRL's ``scale_rewards="batch"`` and flow_grpo's ``global_std``
      (which divides the sum of squares by B, not by B - 1). It includes how prompts differ in difficulty;
    - ``batch_centred``: that of all rewards less their group's mean, as GDPO takes it. It does not;
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
        centred = centred / (_deviation(groups[scored]) + epsilon)
    elif scale == "batch_centred":
        deviation = (centred.square().sum() / (scored.sum() - 1).clamp(min=1)).sqrt()
        centred = centred / (deviation + epsilon)
    if clip is not None:
        centred = centred.clamp(-clip, clip)
    return centred.reshape(-1)


def gdpo_advantages(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    group_size: int,
    *,
    epsilon: float = 1e-4,
    clip: float | None = 5.0,
) -> Tensor:
    """Each reward normalised in its group, then weighted, summed and scaled by the batch (GDPO).

    With a plain weighted sum a reward of large variance drowns the others; here each contributes
    by its weight alone (arXiv 2601.05242). ``rewards`` are [B]; a row unscored by any weighted
    reward gets 0. Returns [B].
    """
    used = [name for name, weight in weights.items() if weight]
    unscored = torch.stack([rewards[name].isnan() for name in used]).any(0)
    total = torch.zeros_like(rewards[used[0]])
    for name in used:
        own = group_advantages(rewards[name], group_size, epsilon=epsilon, clip=None)
        total = total + weights[name] * own
    total = total.masked_fill(unscored, torch.nan)
    return group_advantages(total, group_size, scale="batch_centred", epsilon=epsilon, clip=clip)


def variance_shares(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    group_size: int,
    *,
    normalise: bool = False,
    epsilon: float = 1e-4,
) -> dict[str, float]:
    """The share of each weighted reward in the variance of the total within groups; they add up to 1.

    It is the covariance of the weighted reward with the total, divided by the total's variance: a reward with a share
    near 0 is drowned by the others, whatever its weight, and one below 0 is worked against. Rows that a weighted reward
    leaves unscored do not count. Empty where no total differs within its group.

    Args:
        rewards: each [B].
        normalise: whether each reward is normalised in its group before it is weighted, as `gdpo_advantages` does.
        epsilon: of that normalisation.
    """
    used = [name for name, weight in weights.items() if weight]
    unscored = torch.stack([rewards[name].isnan() for name in used]).any(0)
    scale: Scale = "group" if normalise else "none"
    terms = {
        name: weights[name]
        * group_advantages(
            rewards[name].masked_fill(unscored, torch.nan), group_size, scale=scale, epsilon=epsilon, clip=None
        ).double()
        for name in used
    }
    total = torch.stack(list(terms.values())).sum(0)
    variance = total.square().sum()
    return {name: float((term * total).sum() / variance) for name, term in terms.items()} if variance else {}


def zero_variance_groups(rewards: Tensor, group_size: int) -> Tensor:
    """[N] bool: True for groups whose scored rewards do not differ and so teach nothing."""
    return _constant(_as_groups(rewards, group_size))


def _deviation(values: Tensor) -> Tensor:
    """Standard deviation of [b] values, a scalar; 0 of fewer than two."""
    return values.std() if len(values) > 1 else values.new_zeros(())


def _as_groups(rewards: Tensor, group_size: int) -> Tensor:
    if rewards.ndim != 1 or len(rewards) % group_size:
        raise ValueError(f"expected [N * {group_size}] rewards in group-major order, got shape {tuple(rewards.shape)}")
    return rewards.float().view(-1, group_size)


def _constant(groups: Tensor) -> Tensor:
    """[N, G] -> [N] bool, comparing values themselves: a mean of equal floats may be off by an ulp."""
    low = groups.nan_to_num(torch.inf).amin(1)
    high = groups.nan_to_num(-torch.inf).amax(1)
    return low >= high
