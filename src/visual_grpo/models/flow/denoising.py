"""Denoises start noise to pixels for any flow model: the ODE, stochastic steps in a window, batches, decoding.

Shapes: N entries of the conditions, B rows, W decisions of each (stochastic steps, or noises), C x h x w latents of one
image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from visual_grpo.common.device import map_on_cores
from visual_grpo.common.errors import UserError
from visual_grpo.common.phases import alike, phase
from visual_grpo.common.types import Sample
from visual_grpo.config import PolicyConfig, SamplerConfig
from visual_grpo.models.flow.flow_model import FlowModel, Schedule
from visual_grpo.models.flow.forward_process import STD, noised
from visual_grpo.models.flow.transitions import log_prob, noises, ode_step, transition
from visual_grpo.models.lora_layers import fast_lora
from visual_grpo.models.offload import on_device
from visual_grpo.models.rows import START_NOISE, STEP_NOISE

C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class DenoisedPath:
    """States of B rows at the stochastic steps, or their noised samples x."""

    latents: Tensor
    """[B, C, h, w] float32 after the last step."""
    states: Tensor
    """[B, W, C, h, w] float32 before each stochastic step, or x."""
    next_states: Tensor
    """[B, W, C, h, w] float32 after it, or the target u of the velocity."""
    means: Tensor
    """[B, W, C, h, w] float32 of the transitions that they were sampled from, or the velocities v."""
    log_probs: Tensor
    """[B, W] float32."""
    stats: Mapping[str, float] = field(default_factory=dict)
    """Measurements for the metrics of a step."""


class Denoiser(Generic[C]):
    """Denoises and decodes with one flow model; the LoRA adapter of its transformer is active."""

    def __init__(self, model: FlowModel[C], config: PolicyConfig) -> None:
        self.model, self.config, self.flow = model, config, config.flow

    def start_noise(self, seeds: Sequence[int]) -> Tensor:
        """[B, C, h, w] float32 on the CPU; row i is a function of ``seeds[i]``."""
        return noises([seed ^ START_NOISE for seed in seeds], 1, self.model.latent_shape)[:, 0]

    @phase("denoising")
    @torch.no_grad()
    def integrate(self, conditions: C, entries: Tensor, noise_seeds: Sequence[int], steps: int) -> Tensor:
        """ODE from start noise to latents, [B, C, h, w] float32."""
        schedule = self.model.schedule(steps)
        with on_device(self.model.transformer), fast_lora(self.model.transformer):
            return self._ode(self.start_noise(noise_seeds), conditions, entries, schedule, range(steps))

    @phase("pictures (VAE)")
    @torch.no_grad()
    def pixels(self, latents: Tensor) -> list[Sample]:
        """[B, C, h, w] -> B uint8 images [3, H, W], or videos, on the CPU."""
        parts = map_on_cores(self.model.pixels, latents.split(self.config.decode_batch), latents.device)
        return [sample for part in parts for sample in part]

    def generate(self, conditions: C, seeds: Sequence[int], sampler: SamplerConfig) -> list[Sample]:
        """Generates a sample of each of N entries by the ODE or, if ``sampler.stochastic``, as in training."""
        steps, _ = sampler.denoising()
        entries = torch.arange(len(seeds))
        if not sampler.stochastic:
            return self.pixels(self.integrate(conditions, entries, seeds, steps))
        window = self.window(steps, torch.Generator().manual_seed(0))
        return self.pixels(self.sample_path(conditions, entries, seeds, seeds, steps=steps, window=window).latents)

    def window(self, steps: int, generator: torch.Generator) -> Sequence[int]:
        """Returns the stochastic steps among ``steps`` denoising steps; a window without a start gets a random one."""
        flow = self.flow
        count = flow.stochastic_steps(steps)
        start, latest = flow.window_start, steps - 1 - count
        if start is None:
            start = int(torch.randint(max(latest, 0) + 1, (1,), generator=generator))
        if count < 1 or start > latest:
            raise UserError(
                f"policy.flow's window of {count} steps from step {start} does not end before the last of {steps}"
                " denoising steps; lower window_start or window_steps, or raise sampling.rollout.steps"
            )
        return range(start, start + count)

    def trained_columns(self, window: int, generator: torch.Generator) -> list[int]:
        """Picks the trained steps at random among the ``window`` stochastic ones, the same for all rows."""
        count = self.flow.trained_steps(window)
        if count == window:
            return list(range(window))
        return sorted(torch.randperm(window, generator=generator)[:count].tolist())

    @phase("denoising")
    @torch.no_grad()
    def sample_path(
        self,
        conditions: C,
        entries: Tensor,
        noise_seeds: Sequence[int],
        step_seeds: Sequence[int],
        *,
        steps: int,
        window: Sequence[int],
        shared_prefix: int = 1,
    ) -> DenoisedPath:
        """Stochastic steps in ``window``, ODE elsewhere.

        In the window the adapter runs as in the replay, whose log-probs must be the same to the last bit.

        Args:
            entries: [B] int64, row -> entry of the conditions.
            noise_seeds: [B], of the start noise.
            step_seeds: [B], of the noise of the stochastic steps.
            shared_prefix: number of neighbouring rows with the same conditions and start noise. They are identical
                until the first stochastic step adds noise, and are computed once until then.
        """
        schedule, transformer = self.model.schedule(steps), self.model.transformer
        start = self.start_noise(noise_seeds)[::shared_prefix]
        noise = noises([seed ^ STEP_NOISE for seed in step_seeds], len(window), self.model.latent_shape)
        before, after, means, log_probs = [], [], [], []
        with on_device(transformer):
            with fast_lora(transformer):
                state = self._ode(start, conditions, entries[::shared_prefix], schedule, range(window[0]))
            for column, step in enumerate(window):
                stepped = entries if column else entries[::shared_prefix]
                mean, std = self._transition(state, conditions, stepped, schedule, step)
                if not column:
                    state, mean = state.repeat_interleave(shared_prefix, 0), mean.repeat_interleave(shared_prefix, 0)
                before.append(state)
                state = mean + std * noise[:, column].to(mean.device)
                after.append(state)
                means.append(mean)
                log_probs.append(log_prob(state, mean, std))
            with fast_lora(transformer):
                latents = self._ode(state, conditions, entries, schedule, range(window[-1] + 1, steps))
        return DenoisedPath(
            latents=latents,
            states=torch.stack(before, 1),
            next_states=torch.stack(after, 1),
            means=torch.stack(means, 1),
            log_probs=torch.stack(log_probs, 1),
        )

    @phase("denoising")
    @torch.no_grad()
    def noised_path(
        self,
        conditions: C,
        entries: Tensor,
        noise_seeds: Sequence[int],
        step_seeds: Sequence[int],
        *,
        steps: int,
        window: Sequence[int],
    ) -> DenoisedPath:
        """Samples of the ODE, noised at the levels of the steps in ``window``, for forward-process training.

        Args: as of `sample_path`; ``step_seeds`` are of the noise.
        """
        schedule = self.model.schedule(steps)
        clean = self.integrate(conditions, entries, noise_seeds, steps)
        levels = [schedule.sigmas[step] for step in window]
        states, targets = noised(clean, [seed ^ STEP_NOISE for seed in step_seeds], levels)
        with on_device(self.model.transformer):
            found = [
                self._velocities(states[:, column], conditions, entries, schedule, step)
                for column, step in enumerate(window)
            ]
        velocities = torch.stack(found, 1)
        norms = [part.flatten(2).norm(dim=2) for part in (velocities, targets)]
        return DenoisedPath(
            latents=clean,
            states=states,
            next_states=targets,
            means=velocities,
            log_probs=torch.stack([log_prob(targets[:, k], v, STD) for k, v in enumerate(found)], 1),
            stats={"velocity_norm": float((norms[0] / norms[1]).mean())},
        )

    def velocity(self, state: Tensor, conditions: C, entries: Tensor, schedule: Schedule, step: int) -> Tensor:
        """Returns v [b, C, h, w] at the noise level of a step, with gradient where it is on."""
        return self.model.velocity(conditions, entries)(state, schedule.timesteps[step])

    def step(
        self, state: Tensor, conditions: C, entries: Tensor, schedule: Schedule, step: int
    ) -> tuple[Tensor, float]:
        """Returns mean [b, C, h, w] and standard deviation of a stochastic step, with gradient where it is on."""
        velocity = self.velocity(state, conditions, entries, schedule, step)
        sigma, next_sigma = schedule.sigmas[step], schedule.sigmas[step + 1]
        return transition(velocity, state, sigma, next_sigma, self.flow.noise, self.flow.sampler)

    def _transition(
        self, state: Tensor, conditions: C, entries: Tensor, schedule: Schedule, step: int
    ) -> tuple[Tensor, float]:
        """`step`, a batch at a time."""
        stds: list[float] = []

        def run(part: Tensor, part_entries: Tensor) -> Tensor:
            mean, std = self.step(part, conditions, part_entries, schedule, step)
            stds.append(std)
            return mean

        return self._batched(state, entries, run), stds[0]

    def _velocities(self, state: Tensor, conditions: C, entries: Tensor, schedule: Schedule, step: int) -> Tensor:
        """`velocity`, a batch at a time."""
        return self._batched(state, entries, lambda part, own: self.velocity(part, conditions, own, schedule, step))

    def _ode(self, state: Tensor, conditions: C, entries: Tensor, schedule: Schedule, steps: range) -> Tensor:
        """Takes ``steps`` of the schedule, [b, C, h, w] -> the same, a batch at a time."""

        def run(part: Tensor, part_entries: Tensor) -> Tensor:
            velocity = self.model.velocity(conditions, part_entries) if steps else None
            for step in alike(steps):
                assert velocity is not None
                flow = velocity(part, schedule.timesteps[step])
                part = ode_step(flow, part, schedule.sigmas[step], schedule.sigmas[step + 1])
            return part

        return self._batched(state, entries, run)

    def _batched(self, state: Tensor, entries: Tensor, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Runs ``run(state, entries)`` for ``denoise_batch`` rows at a time, without gradient; joins the results."""
        device, size = self.model.transformer.device, self.config.denoise_batch
        parts = zip(state.to(device).split(size), entries.split(size), strict=True)
        return torch.cat(map_on_cores(lambda part: run(*part), parts, device))
