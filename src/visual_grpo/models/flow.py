"""Flow matching as a policy: its decisions are the stochastic denoising steps (Flow-GRPO, arXiv 2505.05470).

A family offers a `FlowModel`; `FlowPolicy` samples, replays and trains it. The formulas are in flow_sde.py.
Shapes: N prompts (*entries* of the conditions), G samples of each, B = N * G rows (b of them), S trained steps,
C x h x w latents of one image.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from visual_grpo.common.types import PromptRecord, ReplayChunk, Rollout, Sample
from visual_grpo.config import PolicyConfig, SamplerConfig
from visual_grpo.models.denoising import Denoiser
from visual_grpo.models.family import ModelSettings, Module
from visual_grpo.models.flow_sde import log_prob, normalised_log_ratio, transition_kl
from visual_grpo.models.lora import Adapter, AdapterPolicy, AdapterSet
from visual_grpo.models.offload import on_device
from visual_grpo.models.rows import draw_seeds, repeated, rows_by_source_count

C = TypeVar("C")

Velocity = Callable[[Tensor, float], Tensor]
"""(state [b, C, h, w] float32, timestep) -> guided velocity [b, C, h, w] float32, with gradient where it is on."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """n denoising steps of the pipeline's scheduler."""

    timesteps: tuple[float, ...]
    """n of them, as the transformer is called with at each step."""
    sigmas: tuple[float, ...]
    """n + 1 noise levels, the first at most 1, the last 0."""

    @classmethod
    def of(cls, scheduler: Any) -> Schedule:
        """What a scheduler of diffusers was set to."""
        return cls(timesteps=tuple(scheduler.timesteps.tolist()), sigmas=tuple(scheduler.sigmas.tolist()))

    def __len__(self) -> int:
        return len(self.timesteps)


class FlowModel(Protocol[C]):
    """A pipeline at one image size. ``C`` is what its transformer is told of N records."""

    @property
    def transformer(self) -> Any:
        """The diffusers model that the LoRA adapter is on."""
        ...

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(C, h, w) of one image."""
        ...

    def schedule(self, steps: int) -> Schedule: ...

    def conditions(self, records: Sequence[PromptRecord], seeds: Sequence[int], guidance_scale: float) -> C:
        """What the transformer is told of N records.

        ``seeds``: [N], for a model that samples a part of it (GLM-Image's tokens). ``guidance_scale``: 1 = off.
        """
        ...

    def velocity(self, conditions: C, entries: Tensor) -> Velocity:
        """The velocity field of b rows; ``entries`` ([b] int64) says which of the N records each row belongs to.

        What all steps share, such as the embeddings of these rows, is prepared once here.
        """
        ...

    def pixels(self, latents: Tensor) -> list[Tensor]:
        """[b, C, h, w] float32 -> b uint8 images [3, H, W] on the CPU.

        On a CPU several threads call it at the same time.
        """
        ...


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
    shared: int
    """That many neighbouring rows are identical up to and including the state before step ``first_sde_step``."""
    first_sde_step: int
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
        self.denoiser = Denoiser(model, config)
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

        ``noise_seeds``: [N], of the start noise that the decodes of an entry share.
        """
        started = time.perf_counter()
        count, shared = len(prompts), group_size if self.config.share_start_noise else 1
        step_seeds = draw_seeds(count * group_size, generator)
        window = self.denoiser.window(self.steps, generator)
        starts = step_seeds
        if self.config.share_start_noise:
            starts = [seed for seed in noise_seeds for _ in range(group_size)]
        entries = torch.arange(count).repeat_interleave(group_size)
        path = self.denoiser.sample_path(
            conditions, entries, starts, step_seeds, steps=self.steps, window=window, shared=shared
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
            shared=shared,
            first_sde_step=window.start,
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
        with on_device(self.model.transformer):  # Also while the caller goes backward.
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
        with on_device(self.model.transformer), self.adapter.disabled():
            columns = [
                torch.cat([self._step(trajectory, column, rows)[0] for rows in batches])
                for column in range(len(trajectory.steps))
            ]
        return torch.stack(columns, 1)

    def _step(self, trajectory: FlowTrajectory[C], column: int, rows: Tensor) -> tuple[Tensor, float]:
        """Mean [b, C, h, w] and standard deviation of a trained step of ``rows`` ([b] int64)."""
        of_row = None
        if trajectory.steps[column] == trajectory.first_sde_step:
            # As in the rollout: what rows share is computed once, and its gradient collects those of all.
            groups, of_row = (rows // trajectory.shared).unique(return_inverse=True)
            rows = groups * trajectory.shared
        state, entries = trajectory.states[rows, column], trajectory.entries[rows]
        step = trajectory.steps[column]
        mean, std = self.denoiser.step(state, trajectory.conditions, entries, trajectory.schedule, step)
        return mean if of_row is None else mean[of_row], std

    def _trained_columns(self, window: int, generator: torch.Generator) -> list[int]:
        """Which of the window's steps are trained, the same for all rows."""
        count = max(1, round(self.config.flow.train_share * window))
        if count == window:
            return list(range(window))
        return sorted(torch.randperm(window, generator=generator)[:count].tolist())


class FlowGenerator(Generic[C]):
    """Satisfies ``family.Model`` for any `FlowModel`: text encoders and VAE frozen, one LoRA."""

    def __init__(self, model: FlowModel[C], modules: Mapping[str, Module], settings: ModelSettings) -> None:
        """``modules``: the family's, of which there is one."""
        (name,) = modules
        self.model, self.config = model, settings.policy
        self.adapters = AdapterSet(modules, {name: model.transformer})
        self._denoiser = Denoiser(model, settings.policy)

    @classmethod
    def builder(
        cls, model_class: Callable[[Any, tuple[int, int], Any], FlowModel[C]], modules: Mapping[str, Module]
    ) -> Callable[[Any, ModelSettings], FlowGenerator[C]]:
        """``Family.build`` for a model that is made of (pipeline, size, the family's options)."""
        return lambda pipeline, settings: cls(model_class(pipeline, settings.size, settings.options), modules, settings)

    @torch.no_grad()
    def generate(self, records: Sequence[PromptRecord], seeds: Sequence[int], sampler: SamplerConfig) -> list[Sample]:
        """One uint8 image [3, H, W] per record; each depends on its record, its seed and the weights."""
        images: dict[int, Sample] = {}
        for rows in rows_by_source_count(records):
            own_seeds = [seeds[row] for row in rows]
            _, guidance_scale = sampler.denoising()
            conditions = self.model.conditions([records[row] for row in rows], own_seeds, guidance_scale)
            images |= dict(zip(rows, self._denoiser.generate(conditions, own_seeds, sampler), strict=True))
        return [images[row] for row in range(len(records))]

    def policy(
        self, module: str, *, rollout: SamplerConfig, evaluation: SamplerConfig, kl_reference: bool = False
    ) -> FlowPolicy[C]:
        """Decodes of each prompt; ``evaluation`` decides nothing here."""
        return FlowPolicy(self.model, self.adapters[module], rollout, self.config, kl_reference=kl_reference)
