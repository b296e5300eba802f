"""Flow-DPPO: the divergence of a transition instead of its ratio decides which steps are masked (arXiv 2606.11025).

A ratio is an estimate from one sample of how far a step's distribution has moved, and mostly noise. Where the step is
Gaussian with a fixed variance, the divergence is known exactly from the two means.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from visual_grpo.common.errors import UserError


def masked_surrogate(
    ratio: Tensor, advantages: Tensor, divergence: Callable[[], Tensor] | None, limit: float
) -> tuple[Tensor, Tensor]:
    """The loss ``-M ratio A`` per step, [b, s], and [b, s] bool, the steps without gradient (M = 0).

    M is 0 where the step has moved further than ``limit`` and the update would move it further still: the ratio is
    above 1 and A above 0, or both are below.

    Args:
        ratio: [b, s], with gradient.
        advantages: [b].
        divergence: computes the KL of each step to the policy that sampled it, [b, s], nats per latent element; None
            raises UserError.
        limit: in the same unit.
    """
    if divergence is None:
        raise UserError(
            "grpo.loss is dppo, but the policy's replay gives no divergence of its steps: only denoising steps have an"
            " exact one. Use another loss for tokens."
        )
    advantages = advantages[:, None]
    masked = (divergence() > limit) & ((ratio.detach() - 1) * advantages > 0)
    return torch.where(masked, 0.0, -ratio * advantages), masked
