"""Flow matching as a policy: its decisions are the stochastic denoising steps (Flow-GRPO, arXiv 2505.05470), or noises
on samples of the ODE (forward_process.py).

A family offers a `FlowModel`; `FlowPolicy` samples, replays and trains it. The loop over denoising
steps is in denoising.py, their formulas are in transitions.py.
Shapes: N prompts (*entries* of the conditions), G samples of each, B = N * G rows (b of them), S trained decisions,
C x h x w latents of one image.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from visual_grpo.common.decisions import GaussianLikelihoods
from visual_grpo.common.device import map_on_cores
from visual_grpo.common.errors import UserError
from visual_grpo.common.phases import alike, phase
from visual_grpo.common.types import PromptRecord, Rollout, Share
from visual_grpo.config import PolicyConfig, SamplerConfig
from visual_grpo.models.flow.denoising import Denoiser
from visual_grpo.models.flow.flow_model import FlowModel, Schedule
from visual_grpo.models.flow.forward_process import matches
from visual_grpo.models.flow.transitions import step_likelihoods
from visual_grpo.models.lora import Adapter, AdapterPolicy
from visual_grpo.models.offload import on_device
from visual_grpo.models.rows import random_seeds, repeated

C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class FlowTrajectory(Generic[C]):
    """B sampled rows, as the replay needs them."""

    conditions: C
    entries: Tensor
    """[B] int64, row -> entry of the conditions."""
    schedule: Schedule
    steps: tuple[int, ...]
    """[S] trained denoising steps, or those at whose levels noise was added."""
    states: Tensor
    """[B, S, C, h, w], like the next two: the transformer's input, the state before a step or a noised sample."""
    next_states: Tensor
    """The scored value: the state after the step, or the target of the velocity."""
    means: Tensor
    """Where its distribution was centred: the mean of the transition, or the velocity."""
    shared_prefix: int
    """Number of neighbouring rows that are identical until ``first_stochastic_step`` adds noise."""
    first_stochastic_step: int
    reference_means: Tensor | None = None
    """``means`` without the adapter; None without a KL penalty."""

    def taking(self, columns: Sequence[int]) -> FlowTrajectory[C]:
        """Returns the rows with the decisions in these columns of S alone."""
        reference, own = self.reference_means, list(columns)
        return replace(
            self,
            steps=tuple(self.steps[column] for column in own),
            states=self.states[:, own],
            next_states=self.next_states[:, own],
            means=self.means[:, own],
            reference_means=None if reference is None else reference[:, own],
        )


class FlowPolicy(AdapterPolicy[FlowTrajectory[C]]):
    """Samples, replays and trains any `FlowModel`."""

    def __init__(
        self,
        model: FlowModel[C],
        adapter: Adapter,
        sampler: SamplerConfig,
        config: PolicyConfig,
        *,
        kl_reference: bool = False,
        forward_process: bool = False,
    ) -> None:
        """``sampler`` is for training samples; ``kl_reference`` stores the reference's means, for a KL penalty.

        ``forward_process``: the decisions are noises on samples of the ODE, as the losses nft and awm need.

        Raises UserError for several draws of a stochastic step, which has one noise.
        """
        if config.flow.draws > 1 and not forward_process:
            raise UserError(
                f"policy.flow.draws is {config.flow.draws}, and a stochastic step has one noise. Set it to 1, or"
                " forward_process=True for the losses nft and awm."
            )
        super().__init__(adapter)
        self.model, self.config, self.kl_reference = model, config, kl_reference
        self.steps, self.guidance_scale = sampler.denoising()
        self.denoiser, self.forward_process = Denoiser(model, config), forward_process
        self.share_start_noise = config.shares_start_noise(forward_process=forward_process)
        if config.gradient_checkpointing:
            model.transformer.enable_gradient_checkpointing()

    @phase("prompts and conditions")
    @torch.no_grad()
    def rollout(
        self, prompts: Sequence[PromptRecord], group_size: int, generator: torch.Generator, share: Share | None = None
    ) -> Rollout[FlowTrajectory[C]]:
        """Generates G images of each prompt. All randomness comes from seeds, and those from ``generator``."""
        started = time.perf_counter()
        seeds = random_seeds(len(prompts), generator, share)
        conditions = self.model.conditions(prompts, seeds, self.guidance_scale)
        seconds = time.perf_counter() - started
        rollout = self.decode(prompts, conditions, seeds, group_size, generator, share)
        return replace(rollout, stats={"seconds/conditions": seconds, **rollout.stats})

    @torch.no_grad()
    def decode(
        self,
        prompts: Sequence[PromptRecord],
        conditions: C,
        noise_seeds: Sequence[int],
        group_size: int,
        generator: torch.Generator,
        share: Share | None = None,
    ) -> Rollout[FlowTrajectory[C]]:
        """Generates G images of each of N entries of ``conditions``: rows n * G + g.

        ``noise_seeds``: [N], seeds of the start noise that the images of an entry share.
        """
        started = time.perf_counter()
        count, shared_prefix = len(prompts), group_size if self.share_start_noise else 1
        step_seeds = random_seeds(count * group_size, generator, share)
        window = [step for step in self.denoiser.window(self.steps, generator) for _ in range(self.config.flow.draws)]
        starts = step_seeds
        if self.share_start_noise:
            starts = [seed for seed in noise_seeds for _ in range(group_size)]
        entries = torch.arange(count).repeat_interleave(group_size)
        sampled = conditions, entries, starts, step_seeds
        if self.forward_process:
            path = self.denoiser.noised_path(*sampled, steps=self.steps, window=window)
        else:
            path = self.denoiser.sample_path(*sampled, steps=self.steps, window=window, shared_prefix=shared_prefix)
        columns, draws = self.denoiser.trained_columns(len(window), generator), self.config.flow.draws
        turns = [[own for own, column in enumerate(columns) if column % draws == draw] for draw in range(draws)]
        trajectory = FlowTrajectory(
            conditions=conditions,
            entries=entries,
            schedule=self.model.schedule(self.steps),
            steps=tuple(window[column] for column in columns),
            states=path.states[:, columns],
            next_states=path.next_states[:, columns],
            means=path.means[:, columns],
            shared_prefix=shared_prefix,
            first_stochastic_step=window[0],
        )
        if self.kl_reference:
            trajectory = replace(trajectory, reference_means=self.reference_means(trajectory))
        return Rollout(
            prompts=repeated(prompts, group_size),
            samples=self.denoiser.pixels(path.latents),
            trajectory=trajectory,
            log_probs=path.log_probs[:, columns].cpu(),
            mask=torch.ones(len(entries), len(columns), dtype=torch.bool),
            stats={"seconds/decode": time.perf_counter() - started, **path.stats},
            turns=[turn for turn in turns if turn] if draws > 1 else [],
        )

    def replay(self, trajectory: FlowTrajectory[C], rows: Tensor) -> Iterator[GaussianLikelihoods]:
        """Yields a trained decision of each row, so that only one graph is alive at a time."""
        with on_device(self.model.transformer):  # Also while the caller goes backward.
            for column, step in alike(list(enumerate(trajectory.steps))):
                old, after = trajectory.means[rows, column], trajectory.next_states[rows, column]
                reference = None if trajectory.reference_means is None else trajectory.reference_means[rows, column]
                if self.forward_process:
                    velocity, level = self._velocity(trajectory, column, rows), trajectory.schedule.sigmas[step]
                    yield matches(column, level, velocity, old, after, reference)
                else:
                    mean, std = self._step(trajectory, column, rows)
                    yield step_likelihoods(column, std, mean, old, after, reference)

    @phase("reference of denoising")
    @torch.no_grad()
    def reference_means(self, trajectory: FlowTrajectory[C]) -> Tensor:
        """Returns the means, or velocities, without the adapter, [B, S, C, h, w]."""
        batches = torch.arange(len(trajectory.states)).split(self.config.denoise_batch)
        found = self._velocity if self.forward_process else self._mean
        with on_device(self.model.transformer), self.adapter.disabled():
            columns = [
                torch.cat(map_on_cores(partial(found, trajectory, column), batches, trajectory.states.device))
                for column in range(len(trajectory.steps))
            ]
        return torch.stack(columns, 1)

    def _mean(self, trajectory: FlowTrajectory[C], column: int, rows: Tensor) -> Tensor:
        return self._step(trajectory, column, rows)[0]

    def _velocity(self, trajectory: FlowTrajectory[C], column: int, rows: Tensor) -> Tensor:
        """Returns the velocity [b, C, h, w] of noised samples of ``rows`` ([b] int64)."""
        state, entries = trajectory.states[rows, column], trajectory.entries[rows]
        step = trajectory.steps[column]
        return self.denoiser.velocity(state, trajectory.conditions, entries, trajectory.schedule, step)

    def _step(self, trajectory: FlowTrajectory[C], column: int, rows: Tensor) -> tuple[Tensor, float]:
        """Returns mean [b, C, h, w] and standard deviation of a trained step of ``rows`` ([b] int64)."""
        step, prefix_of_row = trajectory.steps[column], None
        if step == trajectory.first_stochastic_step:
            # As in the rollout: rows with a shared prefix are computed once, and the gradient sums over them.
            prefixes, prefix_of_row = (rows // trajectory.shared_prefix).unique(return_inverse=True)
            rows = prefixes * trajectory.shared_prefix
        state, entries = trajectory.states[rows, column], trajectory.entries[rows]
        mean, std = self.denoiser.step(state, trajectory.conditions, entries, trajectory.schedule, step)
        return mean if prefix_of_row is None else mean[prefix_of_row], std
