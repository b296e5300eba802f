"""GLM-Image's autoregressive module as a policy: its decisions are the image tokens.

The samples are decoded from those very tokens by the DiT as it is. Shapes: B rows, T tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from visual_grpo.config import SamplerConfig
from visual_grpo.grpo.losses import k3_kl
from visual_grpo.policies.glm_image import SEED_RANGE, GlmImage
from visual_grpo.policies.token_model import SampledTokens, TokenTrajectory
from visual_grpo.types import PromptRecord, ReplayChunk, Rollout, Sample


class GlmImageArPolicy:
    """Satisfies ``types.Policy[TokenTrajectory]``."""

    def __init__(self, image: GlmImage, sampler: SamplerConfig, *, kl_reference: bool = False) -> None:
        """A policy on the AR adapter of ``image``.

        Args:
            sampler: how training samples are drawn; no top-p or top-k.
            kl_reference: keep the reference's log-probs with every rollout, for a KL penalty.
        """
        self.image, self.sampler, self.kl_reference = image, sampler, kl_reference
        self.adapter = image.adapters["ar"]
        self.checkpointing = image.config.gradient_checkpointing
        if self.checkpointing:
            # use_reentrant=False: a reentrant checkpoint drops the gradient when its input needs none.
            image.pipeline.vision_language_encoder.activation_checkpointing_enable(
                activation_checkpointing_kwargs={"use_reentrant": False}
            )

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

    def replay(self, trajectory: TokenTrajectory, rows: Tensor) -> Iterator[ReplayChunk]:
        """One chunk: all T tokens of ``rows`` under the current adapter, with gradient."""
        log_probs = self._log_probs(trajectory, rows)
        kl = None
        if trajectory.reference_log_probs is not None:
            kl = k3_kl(log_probs, trajectory.reference_log_probs[rows])
        yield ReplayChunk(steps=slice(0, log_probs.shape[1]), log_probs=log_probs, kl=kl)

    def trainable_parameters(self) -> list[nn.Parameter]:
        return self.adapter.parameters()

    def adapter_state_dict(self) -> dict[str, Tensor]:
        return self.adapter.state()

    def load_adapter_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.adapter.load_state(state)

    def save_adapter(self, folder: Path | str) -> None:
        """In the format that ``PeftModel.from_pretrained`` reads."""
        self.adapter.save(folder)

    @torch.no_grad()
    def reference_log_probs(self, trajectory: TokenTrajectory) -> Tensor:
        """[B, T] float32 with the adapter switched off."""
        with self.adapter.disabled():
            batches = torch.arange(len(trajectory.tokens)).split(self.image.config.rollout_batch)
            return torch.cat([self._log_probs(trajectory, rows) for rows in batches])

    def _log_probs(self, trajectory: TokenTrajectory, rows: Tensor) -> Tensor:
        # No module has dropout, so the mode changes nothing else: checkpointing is active only in training mode.
        self.image.pipeline.vision_language_encoder.train(self.checkpointing)
        temperature = self.sampler.temperature
        return self.image.tokens.log_probs(trajectory, rows, 1.0 if temperature is None else temperature)
