"""Group-relative advantages, the clipped surrogate with its KL penalty, and the losses made of them.

Shapes: B rows in group-major order (N prompts x G samples), S decision steps; log-probs, ratios, losses and weights are
[B, S] float32, rewards and advantages [B] float32, masks [B, S] bool with True = counted. A reward of NaN marks an
unscored sample: it is left out of every mean and its advantage is 0 (DeepSeekMath, arXiv 2402.03300, section 4.1).

| loss    | ratio        | aggregation                                  | source                 |
|---------|--------------|----------------------------------------------|------------------------|
| grpo    | per step     | mean over a row's steps, then over rows      | arXiv 2402.03300 eq. 3 |
| dr_grpo | per step     | sum over all steps / (rows * S): no length bias | arXiv 2503.20783    |
| dapo    | per step     | mean over all steps of the batch, clip-higher | arXiv 2503.14476 eq. 8 |
| gspo    | per sequence | mean over rows                               | arXiv 2507.18071 eq. 5 |
| dppo    | per step     | as grpo; masks by divergence instead of clips | arXiv 2606.11025       |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import ReplayChunk, Scores, TrainBatch
from visual_grpo.config import GRPOConfig

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
        raw = groups[scored]
        centred = centred / ((raw.std() if len(raw) > 1 else 0.0) + epsilon)
    elif scale == "batch_centred":
        deviation = (centred.square().sum() / (scored.sum() - 1).clamp(min=1)).sqrt()
        centred = centred / (deviation + epsilon)
    if clip is not None:
        centred = centred.clamp(-clip, clip)
    return centred.reshape(-1)


def combined_rewards(scores: Scores, config: GRPOConfig) -> Tensor:
    """Returns what advantages are made of, [B]: the weighted sum, or with ``combine=gdpo`` that of `gdpo_rewards`."""
    if config.combine == "sum":
        return scores.total
    return gdpo_rewards(scores.rewards, scores.weights, config.group_size, epsilon=config.advantage_epsilon)


def gdpo_rewards(
    rewards: Mapping[str, Tensor], weights: Mapping[str, float], group_size: int, *, epsilon: float = 1e-4
) -> Tensor:
    """Each reward normalised in its group, then weighted and summed (GDPO).

    With a plain weighted sum a reward of large variance drowns the others; here each contributes by its weight alone
    (arXiv 2601.05242). ``rewards`` are [B]; a row unscored by any weighted reward gets NaN. Returns [B].
    """
    used, unscored = used_rewards(rewards, weights)
    total = torch.zeros_like(unscored, dtype=torch.float32)
    for name in used:
        total = total + weights[name] * group_advantages(rewards[name], group_size, epsilon=epsilon, clip=None)
    return total.masked_fill(unscored, torch.nan)


def zero_variance_groups(rewards: Tensor, group_size: int) -> Tensor:
    """[N] bool: True for groups whose scored rewards do not differ and so teach nothing."""
    return _constant(_as_groups(rewards, group_size))


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


Aggregation = Literal["row_mean", "step_mean", "constant"]


@dataclass(frozen=True, kw_only=True)
class LossKind:
    """A named loss; clips and advantage scale are its paper's defaults."""

    aggregation: Aggregation
    sequence_ratio: bool = False
    clip_low: float = 0.2
    clip_high: float = 0.2
    advantage_scale: Scale = "group"
    divergence_limit: float | None = None
    """Limit of `masked_surrogate`, which then replaces the clips; in nats per latent element."""


LOSSES = {
    "grpo": LossKind(aggregation="row_mean"),
    "dr_grpo": LossKind(aggregation="constant", advantage_scale="none"),
    "dapo": LossKind(aggregation="step_mean", clip_high=0.28),
    "gspo": LossKind(aggregation="row_mean", sequence_ratio=True, clip_low=3e-4, clip_high=4e-4),
    "dppo": LossKind(aggregation="row_mean", divergence_limit=1e-5),
}

MAX_LOG_RATIO = 20.0
"""Nats, as in verl. In float32 exp overflows above 88, and inf * 0 is NaN; long before, one step would outweigh the
whole batch. At 20, a ratio of 5e8, a step has its greatest value and no gradient. Below -20 exp only tends to 0."""


def importance_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """``pi(a|s) / pi_old(a|s)`` of every step, [B, S]."""
    return (log_probs - old_log_probs).clamp(max=MAX_LOG_RATIO).exp()


def sequence_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """GSPO's length-normalised ratio ``exp(mean_t log ratio)``, repeated over the steps, [B, S]."""
    difference = (log_probs - old_log_probs) * mask
    mean = difference.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return mean.clamp(max=MAX_LOG_RATIO).exp().expand_as(log_probs)


def truncated_importance_weights(old_log_probs: Tensor, sampler_log_probs: Tensor, cap: float) -> Tensor:
    """min(pi_old / pi_sampler, cap) of each step, [b, s], without gradient.

    Rounding makes the sampler a slightly different policy than the replay: the weight turns averages over its samples
    into averages under pi_old, and the cap bounds their variance (truncated importance sampling, Ionides 2008).
    """
    return (old_log_probs - sampler_log_probs).detach().exp().clamp(max=cap)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """PPO's pessimistic objective as a loss per step, [B, S] (arXiv 1707.06347 eq. 7).

    ``-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)``; clips in units of the ratio.
    """
    advantages = advantages[:, None]
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def clipped_away(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """[B, S] bool: steps whose gradient the clip removes."""
    advantages = advantages[:, None]
    return ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))


def masked_surrogate(
    ratio: Tensor, advantages: Tensor, divergence: Callable[[], Tensor] | None, limit: float
) -> tuple[Tensor, Tensor]:
    """Flow-DPPO's loss ``-M ratio A`` per step, [B, S], and [B, S] bool, the steps without gradient, M = 0.

    A ratio is a noisy estimate, from one sample, of how far a step's distribution has moved; of Gaussian steps
    ``divergence`` knows it exactly: it computes the KL of each step to the policy that sampled it, [B, S], in nats per
    latent element. M is 0 where this is above ``limit`` and the update would move the step further still: the ratio is
    above 1 and A above 0, or both are below (arXiv 2606.11025).
    """
    if divergence is None:
        raise UserError(
            "grpo.loss is dppo, but the policy's replay gives no divergence of its steps: only denoising steps have an"
            " exact one. Use another loss for tokens."
        )
    advantages = advantages[:, None]
    masked = (divergence() > limit) & ((ratio.detach() - 1) * advantages > 0)
    return torch.where(masked, 0.0, -ratio * advantages), masked


def k3_kl(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Estimator of KL(pi || reference) per step, >= 0 and with gradient, in nats, [B, S].

    ``exp(r) - r - 1`` with ``r = log reference - log pi`` (Schulman, "Approximating KL divergence").
    """
    return k3(reference_log_probs - log_probs)


def k3(log_ratio: Tensor) -> Tensor:
    """``exp(r) - r - 1`` of any shape, >= 0."""
    log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
    return log_ratio.exp() - log_ratio - 1


def step_weights(mask: Tensor, aggregation: Aggregation, *, counted_rows: int, counted_steps: int, rows: int) -> Tensor:
    """Weights w, [B, S], such that the loss of the whole batch is ``sum(w * loss)``.

    The counts are those of the *whole* batch (all micro-batches, all ranks): rows with a counted
    step, counted steps, all rows. So micro-batches add up to exactly the full batch.
    """
    weights = mask.float()
    if aggregation == "row_mean":
        return weights / (mask.sum(1, keepdim=True).clamp(min=1) * max(counted_rows, 1))
    if aggregation == "step_mean":
        return weights / max(counted_steps, 1)
    return weights / (rows * mask.shape[1])


class PolicyLoss:
    """The configured loss of one optimizer update on ``batches``, normalised by the counts of all of them."""

    def __init__(self, config: GRPOConfig, batches: Sequence[TrainBatch[Any]], *, reward_only: bool = False) -> None:
        """``reward_only`` leaves out the KL, which no reward decides."""
        self.config, self.kind, self.reward_only = config, LOSSES[config.loss], reward_only
        self.clip_low = config.clip_low if config.clip_low is not None else self.kind.clip_low
        self.clip_high = config.clip_high if config.clip_high is not None else self.kind.clip_high
        masks = [batch.rollout.mask[batch.rows] for batch in batches]
        self.counts = {
            "counted_rows": sum(int(mask.any(1).sum()) for mask in masks),
            "counted_steps": sum(int(mask.sum()) for mask in masks),
            "rows": sum(len(mask) for mask in masks),
        }

    def __call__(
        self, chunk: ReplayChunk, batch: TrainBatch[Any], rows: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Returns a chunk's share of the loss with its metrics.

        Args:
            chunk: log-probs [b, s] of ``rows`` under the current policy.
            rows: [b] rows of the batch's rollout.

        Returns:
            The loss, a scalar with gradient; metrics of each step, [b, s]; and [b, s] bool, the steps that count.
        """
        mask, advantages = batch.rollout.mask[rows], batch.advantages[rows]
        old, counted = batch.old_log_probs[rows][:, chunk.steps], mask[:, chunk.steps]
        if not self.kind.sequence_ratio:
            ratio = importance_ratio(chunk.log_probs, old)
        elif old.shape[1] == mask.shape[1]:
            ratio = sequence_ratio(chunk.log_probs, old, counted)
        else:
            raise UserError(
                "grpo.loss is gspo, whose ratio is of all steps at once, but the policy replays them apart. Use another"
                " loss, or train one denoising step (policy.flow.window_steps=1)."
            )
        loss = clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high)
        clipped = clipped_away(ratio, advantages, self.clip_low, self.clip_high)
        if self.kind.divergence_limit is not None:
            limit = self.config.divergence_limit or self.kind.divergence_limit
            loss, clipped = masked_surrogate(ratio, advantages, chunk.divergence, limit)
        if self.config.kl_weight and not self.reward_only:
            loss = loss + self.config.kl_weight * self._kl(chunk)
        if self.config.sampler_correction is not None:
            sampled = batch.rollout.log_probs[rows][:, chunk.steps]
            loss = loss * truncated_importance_weights(old, sampled, self.config.sampler_correction)
        weights = step_weights(mask, self.kind.aggregation, **self.counts)[:, chunk.steps]
        # Uncounted steps may hold anything, even inf: where() keeps them out of value and gradient.
        total = torch.where(counted, weights * loss, 0.0).sum()
        with torch.no_grad():
            log_ratio = torch.where(counted, chunk.log_probs - old, 0.0)
            metrics = {
                "ratio": torch.where(counted, ratio, 0.0),
                "abs_log_ratio": log_ratio.abs(),
                "clip_fraction": clipped.float(),
                # k3 of the old policy against the new one: how far this rollout's updates have moved it.
                "approx_kl": k3(log_ratio),
            }
            if chunk.kl is not None:
                metrics["kl"] = torch.where(counted, chunk.kl, 0.0)
        return total, metrics, counted

    def _kl(self, chunk: ReplayChunk) -> Tensor:
        if chunk.kl is None:
            raise UserError(
                f"kl_weight is {self.config.kl_weight:g}, but the policy's replay gives no KL to its reference. Make"
                " the policy with it, as load_policy(..., kl_reference=True) does, or set kl_weight to 0."
            )
        return chunk.kl
