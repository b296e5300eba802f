"""GLM-Image's DiT as a policy: its decisions are the stochastic denoising steps (Flow-GRPO, arXiv 2505.05470).

Shapes: B rows, S trained steps, C x h x w latents of one image.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from visual_grpo.config import SamplerConfig
from visual_grpo.errors import UserError
from visual_grpo.policies.flow_sde import log_prob, normalised_log_ratio, transition_kl
from visual_grpo.policies.glm_image.denoiser import Conditions, Schedule
from visual_grpo.policies.glm_image.model import SEED_RANGE, GlmImage, Twins
from visual_grpo.policies.glm_image.sources import source_count
from visual_grpo.policies.token_policy import AdapterPolicy
from visual_grpo.types import PromptRecord, ReplayChunk, Rollout

GIVEN_TOKENS = "prior_tokens"
"""Metadata of a record that brings its image tokens along: rows x columns ids, row by row."""


@dataclass(frozen=True, kw_only=True)
class FlowTrajectory:
    """Everything the replay needs of B sampled rows."""

    conditions: Conditions
    schedule: Schedule
    steps: tuple[int, ...]
    """[S] which denoising steps are trained."""
    states: Tensor
    """[B, S, C, h, w] float32 before each of them."""
    next_states: Tensor
    """[B, S, C, h, w] float32 after it."""
    twins: Twins
    """Rows that are one up to and with the state before step ``parting``."""
    parting: int
    """The first stochastic step."""
    means: Tensor
    """[B, S, C, h, w] of the transitions under the policy that took them."""
    reference_means: Tensor | None = None
    """[B, S, C, h, w] under the adapter-disabled model; None without a KL penalty."""


class GlmImageDitPolicy(AdapterPolicy):
    """Satisfies ``types.Policy[FlowTrajectory]``."""

    def __init__(
        self,
        image: GlmImage,
        sampler: SamplerConfig,
        token_sampler: SamplerConfig,
        *,
        kl_reference: bool = False,
    ) -> None:
        """A policy on the DiT adapter of ``image``.

        Args:
            sampler: denoising steps and guidance of training samples.
            token_sampler: how the AR module draws the tokens of each prompt, once per group.
            kl_reference: keep the reference's transitions with every rollout, for a KL penalty.
        """
        super().__init__(image.adapters["dit"])
        self.image, self.sampler, self.token_sampler, self.kl_reference = image, sampler, token_sampler, kl_reference
        if image.config.gradient_checkpointing:
            image.pipeline.transformer.enable_gradient_checkpointing()

    @torch.no_grad()
    def rollout(
        self, prompts: Sequence[PromptRecord], group_size: int, generator: torch.Generator
    ) -> Rollout[FlowTrajectory]:
        """G decodes of one token sample of each prompt. All randomness comes from seeds drawn from ``generator``."""
        started = time.perf_counter()
        seeds: list[int] = torch.randint(SEED_RANGE, (len(prompts),), generator=generator).tolist()
        tokens = self._tokens(prompts, seeds)
        seconds = time.perf_counter() - started
        rollout = self.decode(prompts, tokens, seeds, group_size, generator)
        return replace(rollout, stats={"seconds/tokens": seconds, **rollout.stats})

    @torch.no_grad()
    def decode(
        self,
        prompts: Sequence[PromptRecord],
        tokens: Tensor,
        noise_seeds: Sequence[int],
        group_size: int,
        generator: torch.Generator,
    ) -> Rollout[FlowTrajectory]:
        """D stochastic decodes of each of M token samples: rows m * D + d.

        Args:
            prompts: [M].
            tokens: [M, T] int64.
            noise_seeds: [M], of the start noise that a token sample's decodes share.
        """
        started = time.perf_counter()
        rows = [record for record in prompts for _ in range(group_size)]
        step_seeds: list[int] = torch.randint(SEED_RANGE, (len(rows),), generator=generator).tolist()
        shared = [seed for seed in noise_seeds for _ in range(group_size)]
        conditions = self.image.conditions(tokens.repeat_interleave(group_size, 0), rows, self.sampler)
        window = self.image.window(self.sampler.steps, generator)
        if self.image.config.share_start_noise:
            starts, twins = shared, Twins.neighbours(len(prompts), group_size)
        else:
            starts, twins = step_seeds, Twins.neighbours(len(rows), 1)
        path = self.image.denoise(conditions, starts, step_seeds, self.sampler.steps, window, twins)
        columns = self._trained(len(window), generator)
        trajectory = FlowTrajectory(
            conditions=conditions,
            schedule=self.image.denoiser.schedule(self.sampler.steps),
            steps=tuple(window[column] for column in columns),
            states=path.states[:, columns],
            next_states=path.next_states[:, columns],
            means=path.means[:, columns],
            twins=twins,
            parting=window.start,
        )
        if self.kl_reference:
            trajectory = replace(trajectory, reference_means=self.reference_means(trajectory))
        log_probs = [log_prob(path.next_states[:, c], path.means[:, c], path.stds[c]) for c in columns]
        samples = self.image.denoiser.pixels(path.latents)
        return Rollout(
            prompts=rows,
            samples=samples,
            trajectory=trajectory,
            log_probs=torch.stack(log_probs, 1).cpu(),
            mask=torch.ones(len(rows), len(columns), dtype=torch.bool),
            stats={"seconds/decode": time.perf_counter() - started},
        )

    def replay(self, trajectory: FlowTrajectory, rows: Tensor) -> Iterator[ReplayChunk]:
        """One chunk a trained step, so that only one step's graph is alive at a time."""
        for column in range(len(trajectory.steps)):
            mean, std = self._step(trajectory, column, rows)
            sample = trajectory.next_states[rows, column]
            log_probs = log_prob(sample, mean, std)
            if self.image.config.flow.ratio_norm:
                old_mean = trajectory.means[rows, column]
                old = log_prob(sample, old_mean, std)
                log_probs = old + normalised_log_ratio(sample, mean, old_mean, std)
            kl = None
            if trajectory.reference_means is not None:
                kl = transition_kl(mean, trajectory.reference_means[rows, column], std)[:, None].cpu()
            yield ReplayChunk(steps=slice(column, column + 1), log_probs=log_probs[:, None].cpu(), kl=kl)

    @torch.no_grad()
    def reference_means(self, trajectory: FlowTrajectory) -> Tensor:
        """[B, S, C, h, w] with the adapter switched off."""
        batches = torch.arange(len(trajectory.states)).split(self.image.config.denoise_batch)
        with self.adapter.disabled():
            columns = [
                torch.cat([self._step(trajectory, column, rows)[0] for rows in batches])
                for column in range(len(trajectory.steps))
            ]
        return torch.stack(columns, 1)

    def _step(self, trajectory: FlowTrajectory, column: int, rows: Tensor) -> tuple[Tensor, float]:
        """Mean [b, C, h, w] and standard deviation of a trained step of ``rows``."""
        if trajectory.steps[column] != trajectory.parting:
            return self._step_of(trajectory, column, rows)
        # As in the rollout: what twins share is computed once, and its gradient collects those of all.
        used, own = trajectory.twins.group_of_row[rows].unique(return_inverse=True)
        mean, std = self._step_of(trajectory, column, trajectory.twins.first[used])
        return mean[own], std

    def _step_of(self, trajectory: FlowTrajectory, column: int, rows: Tensor) -> tuple[Tensor, float]:
        state, step = trajectory.states[rows, column], trajectory.steps[column]
        return self.image.step(state, trajectory.conditions, rows, trajectory.schedule, step)

    def _trained(self, window: int, generator: torch.Generator) -> list[int]:
        """Which of the window's steps are trained, the same for all rows."""
        count = max(1, round(self.image.config.flow.train_share * window))
        if count == window:
            return list(range(window))
        return sorted(torch.randperm(window, generator=generator)[:count].tolist())

    def _tokens(self, prompts: Sequence[PromptRecord], seeds: Sequence[int]) -> Tensor:
        """[N, T]: what the AR module draws, or what a record brings along."""
        sampled = self.image.sample_tokens(prompts, seeds, self.token_sampler).trajectory.tokens
        grid = self.image.tokens.grid(source_count(prompts))
        for row, record in enumerate(prompts):
            given = record.metadata.get(GIVEN_TOKENS)
            if given is not None:
                sampled[row, grid.preview_count :] = _given(
                    record, given, math.prod(grid.image), self.image.tokens.codebook
                )
        return sampled


def _given(record: PromptRecord, given: object, count: int, codebook: int) -> Tensor:
    where = f"record {record.id!r}: metadata {GIVEN_TOKENS}"
    try:
        tokens = torch.tensor(given, dtype=torch.int64).flatten()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{where} must be a list of token ids: {error}") from error
    if len(tokens) != count:
        raise UserError(f"{where} has {len(tokens)} tokens, expected {count}")
    if tokens.min() < 0 or tokens.max() >= codebook:
        raise UserError(f"{where} holds {int(tokens.max())}; ids are 0 to {codebook - 1}")
    return tokens
