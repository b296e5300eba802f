"""The algorithms that turn decisions and advantages into losses.

Shapes: B rows in group-major order (N prompts x G samples), S decision steps; log-probs, ratios, losses and weights are
[B, S] float32, advantages [B] float32, masks [B, S] bool with True = counted.

An algorithm computes a loss for each decision. `policy_loss`, the same for all algorithms, adds masks, aggregation,
KL, counts and the correction to the sampler.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

import torch
from torch import Tensor

from visual_grpo.common.decisions import MAX_LOG_RATIO, GaussianLikelihoods, Likelihoods, Matches, k3
from visual_grpo.config import GRPOConfig
from visual_grpo.grpo.advantages import USUAL_CLIP, Scale

Aggregation = Literal["row_mean", "step_mean", "constant"]
D = TypeVar("D", bound=Likelihoods)


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """``pi(a|s) / pi_old(a|s)`` of every step, [B, S]."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def sequence_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """GSPO's length-normalised ratio ``exp(mean_t log ratio)``, repeated over the steps, [B, S]."""
    mean = torch.where(mask, log_ratio, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return mean.clamp(max=MAX_LOG_RATIO).exp().expand_as(log_ratio)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """PPO's pessimistic objective as a loss per step, [B, S] (arXiv 1707.06347 eq. 7).

    ``-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)``; clips in units of the ratio.
    """
    advantages = advantages[:, None]
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def k3_kl(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Estimator of KL(pi || reference) per step, >= 0 and with gradient, in nats, [B, S].

    ``exp(r) - r - 1`` with ``r = log reference - log pi`` (Schulman, "Approximating KL divergence").
    """
    return k3(reference_log_probs - log_probs)


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC, Generic[D]):
    """Turns decisions and advantages into a loss for each decision.

    A subclass is a dataclass. A parameter of `GRPOConfig` replaces the default of the field with its name.
    """

    needs: ClassVar[type[Likelihoods]] = Likelihoods
    """The decisions ``D`` that a replay has to offer."""
    whole_rows: ClassVar[bool] = False
    """It needs all decisions of a row in one chunk."""
    aggregation: ClassVar[Aggregation] = "row_mean"
    advantage_scale: ClassVar[Scale] = "group"
    average_samples: ClassVar[bool] = False
    """Samples come from the average of the trained weights, if there is one (``average_decay``)."""

    @classmethod
    def of(cls, config: GRPOConfig) -> Self:
        given = {field.name: getattr(config, field.name, None) for field in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})

    @abstractmethod
    def __call__(self, decisions: D, advantages: Tensor, counted: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of each decision, [b, s] with gradient, and metrics [b, s] by name.

        Args:
            advantages: [b].
            counted: [b, s] bool. Decisions that do not count may hold anything; the caller leaves them out.
        """


@dataclass(frozen=True, kw_only=True)
class GRPO(Algorithm[Likelihoods]):
    """DeepSeekMath, arXiv 2402.03300 eq. 3: the mean over a row's steps, then over rows."""

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __call__(self, decisions: Likelihoods, advantages: Tensor, counted: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        ratio, column = self.ratio(decisions, counted), advantages[:, None]
        cut = ((ratio > 1 + self.clip_high) & (column > 0)) | ((ratio < 1 - self.clip_low) & (column < 0))
        loss = clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high)
        return loss, {"ratio": ratio, "clip_fraction": cut}

    def ratio(self, decisions: Likelihoods, counted: Tensor) -> Tensor:
        return importance_ratio(decisions.log_ratio)


@dataclass(frozen=True, kw_only=True)
class DrGRPO(GRPO):
    """arXiv 2503.20783: the sum over all steps / (rows * S), which has no length bias."""

    aggregation: ClassVar[Aggregation] = "constant"
    advantage_scale: ClassVar[Scale] = "none"


@dataclass(frozen=True, kw_only=True)
class DAPO(GRPO):
    """arXiv 2503.14476 eq. 8: the mean over all steps of the batch, and a higher upper clip."""

    aggregation: ClassVar[Aggregation] = "step_mean"
    clip_high: float = 0.28


@dataclass(frozen=True, kw_only=True)
class GSPO(GRPO):
    """arXiv 2507.18071 eq. 5: one ratio for all steps of a row."""

    whole_rows: ClassVar[bool] = True
    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def ratio(self, decisions: Likelihoods, counted: Tensor) -> Tensor:
        return sequence_ratio(decisions.log_ratio, counted)


@dataclass(frozen=True, kw_only=True)
class DPPO(Algorithm[GaussianLikelihoods]):
    """Flow-DPPO, arXiv 2606.11025: ``-M ratio A``, which masks by the exact divergence instead of clipping the ratio.

    A ratio is a noisy estimate, from one sample, of how far a step's distribution has moved. M is 0 where the
    divergence is above ``divergence_limit`` (nats per latent element) and the update would move the step further still:
    the ratio is above 1 and A above 0, or both are below.
    """

    needs: ClassVar[type[Likelihoods]] = GaussianLikelihoods
    divergence_limit: float = 1e-5

    def __call__(
        self, decisions: GaussianLikelihoods, advantages: Tensor, counted: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ratio, advantages = importance_ratio(decisions.log_ratio), advantages[:, None]
        masked = (decisions.divergence() > self.divergence_limit) & ((ratio.detach() - 1) * advantages > 0)
        return torch.where(masked, 0.0, -ratio * advantages), {"ratio": ratio, "clip_fraction": masked}


@dataclass(frozen=True, kw_only=True)
class NFT(Algorithm[Matches]):
    """DiffusionNFT, arXiv 2509.16117, with the weights of its code (NVlabs/DiffusionNFT, scripts/train_nft_sd3.py).

    The policy that moves by ``nft_beta`` from the old one towards the present velocity should match good samples; its
    mirror image, on the other side of the old one, bad ones. A sample with the advantage A is good with the probability
    ``(1 + A / advantage_clip) / 2``. Unlike a clipped ratio, this pulls back a policy that has moved too far.
    """

    needs: ClassVar[type[Likelihoods]] = Matches
    average_samples: ClassVar[bool] = True
    nft_beta: float = 1.0
    average_decay: float = 0.5
    """Largest decay of the averaged weights, which are the old policy (`weight_average.WeightAverage`)."""
    advantage_clip: float = USUAL_CLIP

    def __call__(self, decisions: Matches, advantages: Tensor, counted: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        old, moved = decisions.old_velocity, self.nft_beta * (decisions.velocity - decisions.old_velocity)
        good = 0.5 + (advantages[:, None] / self.advantage_clip).clamp(-1, 1) / 2
        loss = good * self.distance(decisions, old + moved) + (1 - good) * self.distance(decisions, old - moved)
        return self.advantage_clip / self.nft_beta * loss, {}

    @staticmethod
    def distance(decisions: Matches, velocity: Tensor) -> Tensor:
        """[b, s] on the CPU: squared distance of a velocity's sample from the one that was noised, divided by their
        mean absolute distance, so that it grows only linearly."""
        level = decisions.level.to(velocity).view(1, -1, *[1] * (velocity.ndim - 2))
        error = (level * (velocity - decisions.target)).flatten(2)
        return (error.square().mean(2) / error.detach().abs().mean(2).clamp(min=1e-5)).cpu()


@dataclass(frozen=True, kw_only=True)
class AWM(GRPO):
    """Advantage weighted matching, arXiv 2509.25050, with the weights of its authors' code
    (scxue/advantage_weighted_matching, config/dgx_awm.py and scripts/train_sd3_awm.py).

    GRPO whose log-probability is ``-s (e^p - 1e-10^p) / p`` with the mean squared error e of the velocity at the noise
    level s and p = `POWER`, so that a large error counts less than in proportion. Advantages are at most 1, and the
    squared distance to the velocity under an average of the trained weights is added: it pulls back a policy that moves
    too far. Without an average, this is the velocity of the policy that sampled.
    """

    POWER: ClassVar[float] = 0.25
    needs: ClassVar[type[Likelihoods]] = Matches
    advantage_scale: ClassVar[Scale] = "batch"
    clip_low: float = 1.0
    clip_high: float = 1.0
    average_decay: float = 0.3
    """Largest decay of the averaged weights (`weight_average.WeightAverage`)."""
    advantage_clip: float = USUAL_CLIP

    def __call__(self, decisions: Likelihoods, advantages: Tensor, counted: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(decisions, Matches)
        loss, metrics = super().__call__(decisions, (advantages / self.advantage_clip).clamp(-1, 1), counted)
        centre = decisions.old_velocity if decisions.average_velocity is None else decisions.average_velocity
        return loss + mean_square(decisions.velocity - centre), metrics

    def ratio(self, decisions: Likelihoods, counted: Tensor) -> Tensor:
        assert isinstance(decisions, Matches)
        old = self.log_prob(decisions, decisions.old_velocity)
        return importance_ratio(self.log_prob(decisions, decisions.velocity) - old)

    def log_prob(self, decisions: Matches, velocity: Tensor) -> Tensor:
        """[b, s] on the CPU."""
        error = mean_square(velocity - decisions.target)
        return -decisions.level * ((error + 1e-10) ** self.POWER - 1e-10**self.POWER) / self.POWER


def mean_square(latents: Tensor) -> Tensor:
    """[b, s, *D] -> [b, s] on the CPU."""
    return latents.square().flatten(2).mean(2).cpu()


LOSSES: dict[str, type[Algorithm[Any]]] = {
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "dapo": DAPO,
    "gspo": GSPO,
    "dppo": DPPO,
    "nft": NFT,
    "awm": AWM,
}
"""Value of ``grpo.loss`` -> its loss."""


def is_forward_process(loss: str) -> bool:
    """Returns whether the decisions are noises on samples of the ODE (models/flow/forward_process.py)."""
    return issubclass(LOSSES[loss].needs, Matches)


def average_decay(config: GRPOConfig) -> float:
    """Returns the largest decay of the average of the trained weights; 0 = the loss has none."""
    return getattr(LOSSES[config.loss].of(config), "average_decay", 0.0)
