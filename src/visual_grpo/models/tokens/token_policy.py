"""A language model as a policy: its decisions are the generated tokens.

A family offers a `TokenModel`; `TokenPolicy` samples, replays and trains it.
Shapes: N prompts, G samples of each, B = N * G rows (b of them), T tokens, H hidden width, V token ids of the head.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from visual_grpo.common.decisions import Likelihoods
from visual_grpo.common.phases import phase
from visual_grpo.common.types import PromptRecord, Rollout, Sample, Share
from visual_grpo.config import PolicyConfig, SamplerConfig
from visual_grpo.grpo.losses import k3_kl
from visual_grpo.models.lora import Adapter, AdapterPolicy
from visual_grpo.models.lora_layers import fast_lora
from visual_grpo.models.offload import on_device
from visual_grpo.models.rows import random_seeds, repeated
from visual_grpo.models.tokens.generation import SampledTokens, sample_tokens
from visual_grpo.models.tokens.interface import TokenModel, TokenTrajectory
from visual_grpo.models.tokens.probabilities import chosen_log_probs, expected_gap
from visual_grpo.models.tokens.prompt_cache import Prompts, hidden_shared

E = TypeVar("E", bound=Prompts)


@dataclass(frozen=True, kw_only=True)
class SampledGroups(Generic[E]):
    """The tokens of a rollout before they are decoded."""

    records: Sequence[PromptRecord]
    """[B]."""
    decode_seeds: Sequence[int]
    """[B], seeds of random decoding."""
    sampled: SampledTokens[E]


class TokenPolicy(AdapterPolicy[TokenTrajectory[E]]):
    """Samples, replays and trains any `TokenModel`."""

    def __init__(
        self,
        model: TokenModel[E],
        adapter: Adapter,
        sampler: SamplerConfig,
        config: PolicyConfig,
        *,
        kl_reference: bool = False,
    ) -> None:
        """``sampler`` is for training samples; ``kl_reference`` stores log-probs for a KL.

        Raises ValueError where it truncates the distribution (`SamplerConfig.untruncated`).
        """
        super().__init__(adapter)
        self.model, self.sampler, self.config, self.kl_reference = model, sampler.untruncated(), config, kl_reference
        self.temperature = model.sampler(self.sampler).temperature

    @phase("prompts and conditions")
    @torch.no_grad()
    def rollout(
        self, prompts: Sequence[PromptRecord], group_size: int, generator: torch.Generator, share: Share | None = None
    ) -> Rollout[TokenTrajectory[E]]:
        """Generates G samples of each prompt. All randomness comes from seeds, and those from ``generator``."""
        started = time.perf_counter()
        groups = self.sample(prompts, group_size, generator, share)
        seconds = time.perf_counter() - started
        samples = self.model.samples(groups.records, groups.sampled.trajectory, groups.decode_seeds)
        decoding = time.perf_counter() - started - seconds
        return self.as_rollout(groups, samples, {"seconds/tokens": seconds, "seconds/decode": decoding})

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[PromptRecord], group_size: int, generator: torch.Generator, share: Share | None = None
    ) -> SampledGroups[E]:
        """Samples the tokens of a rollout, with the reference's log-probs if there is a KL penalty."""
        records = repeated(prompts, group_size)
        seeds = random_seeds(len(records), generator, share)
        decode_seeds = seeds
        if self.config.shares_start_noise():
            decode_seeds = [seeds[row - row % group_size] for row in range(len(records))]
        sampled = sample_with_adapter(self.model, records, seeds, self.sampler, self.config)
        if self.kl_reference:
            reference = self.reference_log_probs(sampled.trajectory)
            sampled = replace(sampled, trajectory=replace(sampled.trajectory, reference_log_probs=reference))
        return SampledGroups(records=records, decode_seeds=decode_seeds, sampled=sampled)

    def as_rollout(
        self, groups: SampledGroups[E], samples: Sequence[Sample], stats: Mapping[str, float]
    ) -> Rollout[TokenTrajectory[E]]:
        """``samples``: [B], decoded from the tokens of ``groups``; ``stats`` hold ``seconds/tokens``."""
        sampled = groups.sampled
        trajectory = sampled.trajectory
        counted = float(trajectory.mask.sum())
        return Rollout(
            prompts=groups.records,
            samples=samples,
            trajectory=trajectory,
            log_probs=sampled.log_probs,
            mask=trajectory.mask,
            stats={
                "entropy": float(sampled.entropy[trajectory.mask].mean()),
                "tokens_per_sample": counted / len(groups.records),
                "speed/tokens_per_second": counted / stats["seconds/tokens"],
                **stats,
            },
            rounding=self._rounding(sampled),
        )

    def replay(self, trajectory: TokenTrajectory[E], rows: Tensor) -> Iterator[Likelihoods]:
        """Yields one chunk: all T tokens of ``rows`` under the current adapter, with gradient."""
        with on_device(self.model.network):  # Also while the caller goes backward.
            log_probs = self._log_probs(trajectory, rows)
            kl = None
            if trajectory.reference_log_probs is not None:
                kl = k3_kl(log_probs, trajectory.reference_log_probs[rows])
            yield Likelihoods(steps=slice(0, log_probs.shape[1]), log_probs=log_probs, kl=kl)

    @phase("reference of tokens")
    @torch.no_grad()
    def reference_log_probs(self, trajectory: TokenTrajectory[E]) -> Tensor:
        """Returns the log-probs without the adapter, [B, T] float32."""
        with on_device(self.model.network), self.adapter.disabled():
            batches = torch.arange(len(trajectory.tokens)).split(self.config.rollout_batch)
            return torch.cat([self._log_probs(trajectory, rows) for rows in batches])

    def _rounding(self, sampled: SampledTokens[E]) -> float:
        if sampled.deviation is None:
            return 0.0
        deviation = float(sampled.deviation[sampled.trajectory.mask].mean())
        return expected_gap(self.model.network, self.model.head.dtype, deviation)

    def _log_probs(self, trajectory: TokenTrajectory[E], rows: Tensor) -> Tensor:
        checkpointing = self.config.gradient_checkpointing
        return token_log_probs(self.model, trajectory, rows, self.temperature, checkpointing=checkpointing)


def sample_with_adapter(
    model: TokenModel[E],
    records: Sequence[PromptRecord],
    seeds: Sequence[int],
    settings: SamplerConfig,
    config: PolicyConfig,
) -> SampledTokens[E]:
    """Samples B trajectories, under the adapter unless it is disabled."""
    with on_device(model.network), fast_lora(model.network):
        return sample_tokens(model, records, seeds, model.sampler(settings), config.rollout_batch)


def token_log_probs(
    model: TokenModel[E],
    trajectory: TokenTrajectory[E],
    rows: Tensor,
    temperature: float,
    *,
    checkpointing: bool = False,
) -> Tensor:
    """Returns log-probs of the stored tokens of ``rows`` ([b]) under the present weights, [b, T] float32 on the CPU."""
    tokens, prompt_of_row = trajectory.tokens[rows], trajectory.prompt_of_row[rows]
    hidden = hidden_shared(model.network, trajectory.prompts, prompt_of_row, tokens, checkpointing=checkpointing)
    return chosen_log_probs(hidden, model.head, tokens, temperature, model.bias).cpu()
