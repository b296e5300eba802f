"""Any flow model as a policy: its decisions are the stochastic denoising steps (Flow-GRPO, arXiv 2505.05470).

Shapes: N prompts, G samples of each, B = N * G rows, S trained steps, C x h x w latents of one image.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from visual_grpo.config import PolicyConfig, SamplerConfig
from visual_grpo.hardware.turns import present
from visual_grpo.policies.adapters import AdapterPolicy
from visual_grpo.policies.denoising import Denoiser, Twins
from visual_grpo.policies.flow_model import FlowModel, Schedule
from visual_grpo.policies.flow_sde import log_prob, normalised_log_ratio, transition_kl
from visual_grpo.policies.lora import Adapter
from visual_grpo.policies.rows import draw_seeds, repeated
from visual_grpo.types import PromptRecord, ReplayChunk, Rollout

C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class FlowTrajectory(Generic[C]):
    """Everything the replay needs of B sampled rows."""

    conditions: C
    entries: Tensor
    """[B] int64, which of the conditions' entries each row has."""
    schedule: Schedule
    steps: tuple[int, ...]
    """[S] which denoising steps are trained."""
    states: Tensor
    """[B, S, C, h, w] float32 before each of them."""
    next_states: Tensor
    """[B, S, C, h, w] float32 after it."""
    means: Tensor
    """[B, S, C, h, w] of the transitions under the policy that took them."""
    twins: Twins
    """Rows that are identical up to and including the state before step ``parting``."""
    parting: int
    """The first stochastic step."""
    reference_means: Tensor | None = None
    """[B, S, C, h, w] under the adapter-disabled model; None without a KL penalty."""


class FlowPolicy(AdapterPolicy, Generic[C]):
    """Satisfies ``types.Policy[FlowTrajectory[C]]`` for any `FlowModel`."""

    def __init__(
        self,
        model: FlowModel[C],
        adapter: Adapter,
        sampler: SamplerConfig,
        config: PolicyConfig,
        *,
        kl_reference: bool = False,
    ) -> None:
        """A policy on the ``adapter`` of the model's transformer.

        Args:
            sampler: denoising steps and guidance of training samples.
            kl_reference: store the reference's transitions with every rollout, for a KL penalty.
        """
        super().__init__(adapter)
        self.model, self.config, self.kl_reference = model, config, kl_reference
        self.steps, self.guidance_scale = sampler.denoising()
        self.denoiser = Denoiser(
            model, config.flow, denoise_batch=config.denoise_batch, decode_batch=config.decode_batch
        )
        if config.gradient_checkpointing:
            model.transformer.enable_gradient_checkpointing()

    @torch.no_grad()
    def rollout(
        self, prompts: Sequence[PromptRecord], group_size: int, generator: torch.Generator
    ) -> Rollout[FlowTrajectory[C]]:
        """G stochastic decodes of each prompt. All randomness comes from seeds drawn from ``generator``."""
        started = time.perf_counter()
        seeds = draw_seeds(len(prompts), generator)
        conditions = self.model.conditions(prompts, seeds, self.guidance_scale)
        seconds = time.perf_counter() - started
        rollout = self.decode(prompts, conditions, seeds, group_size, generator)
        return replace(rollout, stats={"seconds/conditions": seconds, **rollout.stats})

    @torch.no_grad()
    def decode(
        self,
        prompts: Sequence[PromptRecord],
        conditions: C,
        noise_seeds: Sequence[int],
        group_size: int,
        generator: torch.Generator,
    ) -> Rollout[FlowTrajectory[C]]:
        """G stochastic decodes of each of N entries of ``conditions``: rows n * G + g.

        Args:
            prompts: [N].
            noise_seeds: [N], of the start noise that the decodes of an entry share.
        """
        started = time.perf_counter()
        count = len(prompts)
        step_seeds = draw_seeds(count * group_size, generator)
        window = self.denoiser.window(self.steps, generator)
        if self.config.share_start_noise:
            starts = [seed for seed in noise_seeds for _ in range(group_size)]
            twins = Twins.neighbours(count, group_size)
        else:
            starts, twins = step_seeds, Twins.neighbours(count * group_size, 1)
        entries = torch.arange(count).repeat_interleave(group_size)
        path = self.denoiser.sample_path(
            conditions, entries, starts, step_seeds, steps=self.steps, window=window, twins=twins
        )
        columns = self._trained_columns(len(window), generator)
        trajectory = FlowTrajectory(
            conditions=conditions,
            entries=entries,
            schedule=self.model.schedule(self.steps),
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
        return Rollout(
            prompts=repeated(prompts, group_size),
            samples=self.denoiser.pixels(path.latents),
            trajectory=trajectory,
            log_probs=torch.stack(log_probs, 1).cpu(),
            mask=torch.ones(len(entries), len(columns), dtype=torch.bool),
            stats={"seconds/decode": time.perf_counter() - started},
        )

    def replay(self, trajectory: FlowTrajectory[C], rows: Tensor) -> Iterator[ReplayChunk]:
        """One chunk per trained step, so that only one step's graph is alive at a time."""
        with present(self.model.transformer):  # Also while the caller goes backward.
            yield from self._chunks(trajectory, rows)

    def _chunks(self, trajectory: FlowTrajectory[C], rows: Tensor) -> Iterator[ReplayChunk]:
        for column in range(len(trajectory.steps)):
            mean, std = self._step(trajectory, column, rows)
            sample = trajectory.next_states[rows, column]
            log_probs = log_prob(sample, mean, std)
            if self.config.flow.ratio_norm:
                old_mean = trajectory.means[rows, column]
                old = log_prob(sample, old_mean, std)
                log_probs = old + normalised_log_ratio(sample, mean, old_mean, std)
            kl = None
            if trajectory.reference_means is not None:
                kl = transition_kl(mean, trajectory.reference_means[rows, column], std)[:, None].cpu()
            yield ReplayChunk(steps=slice(column, column + 1), log_probs=log_probs[:, None].cpu(), kl=kl)

    @torch.no_grad()
    def reference_means(self, trajectory: FlowTrajectory[C]) -> Tensor:
        """[B, S, C, h, w] with the adapter switched off."""
        batches = torch.arange(len(trajectory.states)).split(self.config.denoise_batch)
        with present(self.model.transformer), self.adapter.disabled():
            columns = [
                torch.cat([self._step(trajectory, column, rows)[0] for rows in batches])
                for column in range(len(trajectory.steps))
            ]
        return torch.stack(columns, 1)

    def _step(self, trajectory: FlowTrajectory[C], column: int, rows: Tensor) -> tuple[Tensor, float]:
        """Mean [b, C, h, w] and standard deviation of a trained step of ``rows`` ([b] int64)."""
        if trajectory.steps[column] != trajectory.parting:
            return self._step_of(trajectory, column, rows)
        # As in the rollout: what twins share is computed once, and its gradient collects those of all.
        used, group_of_row = trajectory.twins.group_of_row[rows].unique(return_inverse=True)
        mean, std = self._step_of(trajectory, column, trajectory.twins.first[used])
        return mean[group_of_row], std

    def _step_of(self, trajectory: FlowTrajectory[C], column: int, rows: Tensor) -> tuple[Tensor, float]:
        state, entries = trajectory.states[rows, column], trajectory.entries[rows]
        return self.denoiser.step(state, trajectory.conditions, entries, trajectory.schedule, trajectory.steps[column])

    def _trained_columns(self, window: int, generator: torch.Generator) -> list[int]:
        """Which of the window's steps are trained, the same for all rows."""
        count = max(1, round(self.config.flow.train_share * window))
        if count == window:
            return list(range(window))
        return sorted(torch.randperm(window, generator=generator)[:count].tolist())
