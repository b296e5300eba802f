"""GLM-Image's autoregressive module as a policy: its decisions are the image tokens.

The samples are decoded from those very tokens by the frozen DiT and VAE. Shapes: B rows, T tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from visual_grpo.config import PolicyConfig, SamplerConfig
from visual_grpo.grpo.losses import k3_kl
from visual_grpo.policies import lora
from visual_grpo.policies.glm_image import TokenDecoder
from visual_grpo.policies.token_model import SampledTokens, TokenModel, TokenTrajectory
from visual_grpo.types import PromptRecord, ReplayChunk, Rollout, Sample

if TYPE_CHECKING:
    from diffusers import GlmImagePipeline

LORA_TARGETS = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_up_proj|down_proj)"
SEED_RANGE = 2**62


class GlmImageArPolicy:
    """Satisfies ``types.Policy[TokenTrajectory]``."""

    def __init__(
        self,
        pipeline: GlmImagePipeline,
        config: PolicyConfig,
        rollout_sampler: SamplerConfig,
        size: tuple[int, int],
        *,
        kl_reference: bool = False,
        adapter: Path | None = None,
        seed: int = 0,
    ) -> None:
        """A policy on ``pipeline``'s AR module with a fresh LoRA, or with the saved one in ``adapter``.

        Args:
            rollout_sampler: how training samples are drawn; no top-p or top-k.
            size: (height, width) in pixels, multiples of 32.
            kl_reference: keep the reference's log-probs with every rollout, for a KL penalty.
            seed: of the LoRA's initial values.
        """
        self.pipeline, self.config, self.rollout_sampler, self.size = pipeline, config, rollout_sampler, size
        self.kl_reference = kl_reference
        base = pipeline.vision_language_encoder
        if adapter is not None:
            self.model = lora.load_lora(base, adapter)
        else:
            self.model = lora.attach_lora(base, config.lora, LORA_TARGETS, seed)
        if config.gradient_checkpointing:
            # use_reentrant=False: a reentrant checkpoint drops the gradient when its input needs none.
            base.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        self.tokens = TokenModel(
            base,
            pipeline.processor,
            size,
            batch=config.rollout_batch,
            share_prefix=config.share_prefix and not config.gradient_checkpointing,
        )
        self.decoder = TokenDecoder(pipeline, denoise_batch=config.denoise_batch, decode_batch=config.decode_batch)

    @torch.no_grad()
    def rollout(
        self, prompts: Sequence[PromptRecord], group_size: int, generator: torch.Generator
    ) -> Rollout[TokenTrajectory]:
        """G samples of each prompt. All randomness comes from seeds drawn from ``generator``."""
        rows = [record for record in prompts for _ in range(group_size)]
        seeds: list[int] = torch.randint(SEED_RANGE, (len(rows),), generator=generator).tolist()
        noise_seeds = seeds
        if self.config.share_start_noise:
            noise_seeds = [seeds[i - i % group_size] for i in range(len(rows))]
        started = time.perf_counter()
        sampled = self.sample_tokens(rows, seeds, self.rollout_sampler)
        trajectory = sampled.trajectory
        if self.kl_reference:
            trajectory = replace(trajectory, reference_log_probs=self.reference_log_probs(trajectory))
        seconds = time.perf_counter() - started
        samples = self.decode(trajectory.tokens, rows, noise_seeds, self.rollout_sampler)
        stats = {
            "entropy": float(sampled.entropy.mean()),
            "speed/tokens_per_second": trajectory.tokens.numel() / seconds,
            "seconds/tokens": seconds,
            "seconds/decode": time.perf_counter() - started - seconds,
        }
        return Rollout(
            prompts=rows,
            samples=samples,
            trajectory=trajectory,
            log_probs=sampled.log_probs,
            mask=torch.ones(trajectory.tokens.shape, dtype=torch.bool),
            stats=stats,
        )

    def replay(self, trajectory: TokenTrajectory, rows: Tensor) -> Iterator[ReplayChunk]:
        """One chunk: all T tokens of ``rows`` under the current adapter, with gradient."""
        log_probs = self._log_probs(trajectory, rows)
        kl = None
        if trajectory.reference_log_probs is not None:
            kl = k3_kl(log_probs, trajectory.reference_log_probs[rows])
        yield ReplayChunk(steps=slice(0, log_probs.shape[1]), log_probs=log_probs, kl=kl)

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def adapter_state_dict(self) -> dict[str, Tensor]:
        return lora.adapter_state(self.model)

    def load_adapter_state_dict(self, state: Mapping[str, Tensor]) -> None:
        lora.load_adapter_state(self.model, state)

    def save_adapter(self, folder: Path | str) -> None:
        """peft's own format: ``adapter_config.json`` and ``adapter_model.safetensors``."""
        self.model.save_pretrained(str(folder))

    @torch.no_grad()
    def generate(self, prompts: Sequence[PromptRecord], seeds: Sequence[int], sampler: SamplerConfig) -> list[Sample]:
        """One uint8 image [3, H, W] a prompt; each depends on its prompt, its seed and the weights."""
        sampled = self.sample_tokens(prompts, seeds, sampler)
        return self.decode(sampled.trajectory.tokens, prompts, seeds, sampler)

    def sample_tokens(
        self, prompts: Sequence[PromptRecord], seeds: Sequence[int], sampler: SamplerConfig
    ) -> SampledTokens:
        """B trajectories under the current adapter, merged into the weights meanwhile."""
        self.model.eval()
        drawn_from = self.tokens.sampler(sampler.temperature, sampler.top_p, sampler.top_k)
        with lora.merged(self.model):
            return self.tokens.sample([record.prompt for record in prompts], seeds, drawn_from)

    @torch.no_grad()
    def reference_log_probs(self, trajectory: TokenTrajectory) -> Tensor:
        """[B, T] float32 with the adapter switched off."""
        with self.model.disable_adapter():
            batches = torch.arange(len(trajectory.tokens)).split(self.config.rollout_batch)
            return torch.cat([self._log_probs(trajectory, rows) for rows in batches])

    def decode(
        self, tokens: Tensor, prompts: Sequence[PromptRecord], noise_seeds: Sequence[int], sampler: SamplerConfig
    ) -> list[Sample]:
        """[B, T] tokens -> B uint8 images [3, H, W]; only the large grid's tokens reach the DiT."""
        grid = self.tokens.grid
        large = tokens[:, grid.preview_count :].view(-1, *grid.image)
        return self.decoder.decode(large, [record.prompt for record in prompts], noise_seeds, self.size, sampler)

    def _log_probs(self, trajectory: TokenTrajectory, rows: Tensor) -> Tensor:
        # No module has dropout, so the mode changes nothing else: checkpointing is active only in training mode.
        self.model.train(self.config.gradient_checkpointing)
        temperature = self.rollout_sampler.temperature
        return self.tokens.log_probs(trajectory, rows, 1.0 if temperature is None else temperature)
