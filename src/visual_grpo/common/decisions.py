"""Decisions of a policy, scored again with gradient: what a replay offers to an algorithm.

Shapes: b rows with s decisions each, [b, s] float32 on the CPU; latents of shape D, [b, s, *D] float32 on the model's
device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Nats, as in verl. In float32 exp overflows above 88, and inf * 0 is NaN; long before, one step would outweigh the
whole batch. At 20, a ratio of 5e8, a step has its greatest value and no gradient. Below -20 exp only tends to 0."""


def k3(log_ratio: Tensor) -> Tensor:
    """``exp(r) - r - 1`` of any shape, >= 0."""
    log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
    return log_ratio.exp() - log_ratio - 1


@dataclass(frozen=True, kw_only=True)
class Likelihoods:
    """Decisions with a log-probability, such as tokens."""

    described: ClassVar[str] = "log-probs"

    steps: slice
    """The columns of S that these are."""
    log_probs: Tensor
    """[b, s] with gradient, in nats; of a denoising step divided by sqrt(D) (``models.flow.transitions.log_prob``)."""
    kl: Tensor | None = None
    """[b, s] >= 0 with gradient: KL to the reference policy; None if the policy has no reference, and then
    ``kl_weight`` must be 0."""
    old_log_probs: Tensor | None = None
    """[b, s], the denominator of the ratio, which the trainer fills in (``grpo.old_log_probs``)."""
    sampled_log_probs: Tensor | None = None
    """[b, s] as the sampler computed them, filled in by the trainer as well."""

    @property
    def log_ratio(self) -> Tensor:
        """[b, s] with gradient: log-ratio to the old policy."""
        assert self.old_log_probs is not None
        return self.log_probs - self.old_log_probs

    @property
    def sampler_ratio(self) -> Tensor:
        """[b, s]: ``pi_old(a|s) / pi_sampler(a|s)``, no gradient; 1 unless the old log-probs are the replay's."""
        assert self.old_log_probs is not None
        assert self.sampled_log_probs is not None
        return (self.old_log_probs - self.sampled_log_probs).exp()

    def gap(self) -> Tensor:
        """[b, s]: |log-ratio| to the sampler, which is rounding alone before the first update; no gradient."""
        assert self.sampled_log_probs is not None
        return (self.log_probs.detach() - self.sampled_log_probs).abs()

    @torch.no_grad()
    def moved(self) -> Tensor:
        """[b, s] >= 0: KL to the policy that sampled, here the k3 estimate in nats; no gradient."""
        return k3(self.log_ratio)


@dataclass(frozen=True, kw_only=True)
class GaussianLikelihoods(Likelihoods):
    """Decisions whose distribution is a Gaussian, such as stochastic denoising steps: their KL is known exactly."""

    described: ClassVar[str] = "exact divergences (flow modules have them)"

    divergence: Callable[[], Tensor]
    """Computes the exact KL to the policy that sampled, [b, s] >= 0 in nats per latent element, without gradient."""

    def moved(self) -> Tensor:
        """[b, s] >= 0: the exact KL to the policy that sampled, in nats per latent element; no gradient."""
        return self.divergence()


@dataclass(frozen=True, kw_only=True)
class Matches(GaussianLikelihoods):
    """Noised samples and the velocities that the model gives them (`models.flow.forward_process`).

    Read as likelihoods: the target's under N(velocity, 1/2).
    """

    described: ClassVar[str] = "velocities (flow modules have them)"

    velocity: Tensor
    """[b, s, *D] with gradient."""
    old_velocity: Tensor
    """[b, s, *D] of the policy that sampled."""
    target: Tensor
    """[b, s, *D], noise - sample."""
    level: Tensor
    """[s] noise levels in (0, 1]."""
    average_velocity: Tensor | None = None
    """[b, s, *D] under the average of the trained weights, which the trainer fills in if the loss has one that does not
    sample."""
