"""Four named losses: the clipped surrogate with its KL penalty, and the three ways to aggregate them.

Shapes: B rows, S decision steps; log-probs, ratios, losses and weights are [B, S] float32,
advantages [B], masks [B, S] bool with True = counted.

| loss    | ratio        | aggregation                                  | source                 |
|---------|--------------|----------------------------------------------|------------------------|
| grpo    | per step     | mean over a row's steps, then over rows      | arXiv 2402.03300 eq. 3 |
| dr_grpo | per step     | sum over all steps / (rows * S): no length bias | arXiv 2503.20783    |
| dapo    | per step     | mean over all steps of the batch, clip-higher | arXiv 2503.14476 eq. 8 |
| gspo    | per sequence | mean over rows                               | arXiv 2507.18071 eq. 5 |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from visual_grpo.grpo.advantages import Scale

Aggregation = Literal["row_mean", "step_mean", "constant"]


@dataclass(frozen=True, kw_only=True)
class LossKind:
    """What a named loss fixes; the clips and the advantage scale are its paper's defaults."""

    aggregation: Aggregation
    sequence_ratio: bool = False
    clip_low: float = 0.2
    clip_high: float = 0.2
    advantage_scale: Scale = "group"


LOSSES = {
    "grpo": LossKind(aggregation="row_mean"),
    "dr_grpo": LossKind(aggregation="constant", advantage_scale="none"),
    "dapo": LossKind(aggregation="step_mean", clip_high=0.28),
    "gspo": LossKind(aggregation="row_mean", sequence_ratio=True, clip_low=3e-4, clip_high=4e-4),
}

MAX_LOG_RATIO = 20.0
"""Nats, as in verl. In float32 exp overflows above 88, and inf * 0 is NaN; long before, one step would outweigh the
whole batch. At 20, a ratio of 5e8, a step has its greatest value and no gradient. Below -20 exp only tends to 0."""


def importance_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """``pi(a|s) / pi_old(a|s)`` of every step, [B, S]."""
    return _bounded(log_probs - old_log_probs).exp()


def sequence_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """GSPO's length-normalised ratio ``exp(mean_t log ratio)``, repeated over the steps, [B, S]."""
    difference = (log_probs - old_log_probs) * mask
    mean = difference.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return _bounded(mean).exp().expand_as(log_probs)


def truncated_importance_weights(log_probs: Tensor, sampler_log_probs: Tensor, cap: float) -> Tensor:
    """min(pi_old / pi_sampler, cap) of each step, without gradient.

    The sampler computes the policy by another path, whose rounding makes it a slightly different policy: the weight
    makes expectations over its samples those over pi_old's, the cap bounds their variance (truncated importance
    sampling, Ionides 2008).

    Args:
        log_probs, sampler_log_probs: [b, s] of the policy that sampled, by the replay and by the sampler.
    """
    return (log_probs - sampler_log_probs).detach().exp().clamp(max=cap)


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


def k3_kl(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Estimator of KL(pi || reference) per step, >= 0 and with gradient, in nats, [B, S].

    ``exp(r) - r - 1`` with ``r = log reference - log pi`` (Schulman, "Approximating KL divergence").
    """
    return k3(reference_log_probs - log_probs)


def k3(log_ratio: Tensor) -> Tensor:
    """``exp(r) - r - 1`` of any shape, >= 0."""
    log_ratio = _bounded(log_ratio)
    return log_ratio.exp() - log_ratio - 1


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=MAX_LOG_RATIO)


def step_weights(mask: Tensor, aggregation: Aggregation, *, counted_rows: int, counted_steps: int, rows: int) -> Tensor:
    """Weights w, [B, S], such that the loss of the whole batch is ``sum(w * loss)``.

    The counts are those of the *whole* batch (all micro-batches, all ranks): rows with a counted
    step, counted steps, rows of any kind. So micro-batches add up to exactly the full batch.
    """
    weights = mask.float()
    if aggregation == "row_mean":
        return weights / (mask.sum(1, keepdim=True).clamp(min=1) * max(counted_rows, 1))
    if aggregation == "step_mean":
        return weights / max(counted_steps, 1)
    return weights / (rows * mask.shape[1])
