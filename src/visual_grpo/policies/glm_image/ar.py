"""GLM-Image's autoregressive module as a policy: its decisions are the image tokens.

The samples are decoded from those very tokens by the DiT as it is. Shapes: B rows, T tokens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from visual_grpo.config import SamplerConfig
from visual_grpo.policies.glm_image.model import SEED_RANGE, GlmImage
from visual_grpo.policies.glm_image.token_model import SampledTokens, TokenTrajectory
from visual_grpo.policies.token_policy import TokenPolicy
from visual_grpo.types import PromptRecord, Rollout, Sample


class GlmImageArPolicy(TokenPolicy[TokenTrajectory]):
    """Satisfies ``types.Policy[TokenTrajectory]``."""

    def __init__(self, image: GlmImage, sampler: SamplerConfig, *, kl_reference: bool = False) -> None:
        """A policy on the AR adapter of ``image``.

        Args:
            sampler: how training samples are drawn; no top-p or top-k.
            kl_reference: keep the reference's log-probs with every rollout, for a KL penalty.
        """
        super().__init__(
            image.pipeline.vision_language_encoder, image.adapters["ar"], image.tokens, sampler, image.config
        )
        self.image, self.kl_reference = image, kl_reference

    @torch.no_grad()
    def rollout(
        self, prompts: Sequence[PromptRecord], group_size: int, generator: torch.Generator
    ) -> Rollout[TokenTrajectory]:
        """G samples of each prompt. All randomness comes from seeds drawn from ``generator``."""
        started = time.perf_counter()
        rows, noise_seeds, sampled = self.sample(prompts, group_size, generator)
        seconds = time.perf_counter() - started
        samples = self.image.decode(sampled.trajectory.tokens, rows, noise_seeds, self.sampler)
        decoding = time.perf_counter() - started - seconds
        return self.as_rollout(rows, samples, sampled, {"seconds/tokens": seconds, "seconds/decode": decoding})

    def sample(
        self, prompts: Sequence[PromptRecord], group_size: int, generator: torch.Generator
    ) -> tuple[list[PromptRecord], list[int], SampledTokens]:
        """The tokens of a rollout: [B] records, [B] seeds of the decoder's start noise, and what was sampled."""
        rows = [record for record in prompts for _ in range(group_size)]
        seeds: list[int] = torch.randint(SEED_RANGE, (len(rows),), generator=generator).tolist()
        noise_seeds = seeds
        if self.image.config.share_start_noise:
            noise_seeds = [seeds[i - i % group_size] for i in range(len(rows))]
        sampled = self.image.sample_tokens(rows, seeds, self.sampler)
        if self.kl_reference:
            reference = self.reference_log_probs(sampled.trajectory)
            sampled = replace(sampled, trajectory=replace(sampled.trajectory, reference_log_probs=reference))
        return rows, noise_seeds, sampled

    def as_rollout(
        self,
        rows: Sequence[PromptRecord],
        samples: Sequence[Sample],
        sampled: SampledTokens,
        stats: Mapping[str, float],
    ) -> Rollout[TokenTrajectory]:
        """``samples``: [B], decoded from what was ``sampled``."""
        tokens = sampled.trajectory.tokens
        speed = tokens.numel() / stats["seconds/tokens"]
        return Rollout(
            prompts=rows,
            samples=samples,
            trajectory=sampled.trajectory,
            log_probs=sampled.log_probs,
            mask=torch.ones(tokens.shape, dtype=torch.bool),
            stats={"entropy": float(sampled.entropy.mean()), "speed/tokens_per_second": speed, **stats},
        )
