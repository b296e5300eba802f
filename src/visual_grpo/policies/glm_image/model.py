"""GLM-Image whole: tokens by the AR module, latents by the DiT, pixels by the VAE, with the adapters that it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from visual_grpo.config import Module, PolicyConfig, SamplerConfig
from visual_grpo.errors import UserError
from visual_grpo.policies import lora
from visual_grpo.policies.flow_sde import noises, transition
from visual_grpo.policies.glm_image.denoiser import Conditions, Denoiser, Schedule
from visual_grpo.policies.glm_image.sources import SourceEncoder, source_count
from visual_grpo.policies.glm_image.token_model import SampledTokens, TokenModel
from visual_grpo.policies.lora import Adapter, DitAdapter, PeftAdapter
from visual_grpo.types import PromptRecord, Sample

if TYPE_CHECKING:
    from diffusers import GlmImagePipeline

SEED_RANGE = 2**62
_NOISE_STREAM = 2**61
"""Xored into an image's seed for the noise of its denoising steps: another stream than its start noise."""


@dataclass(frozen=True, kw_only=True)
class Twins:
    """Rows with one prompt, tokens and start noise: they are one until the first stochastic step's noise.

    What comes before is computed once for each group, forward and backward: of G decodes G - 1 passes are saved.
    """

    first: Tensor
    """[M] int64, the first row of each group."""
    group_of_row: Tensor
    """[B] int64."""

    @classmethod
    def neighbours(cls, count: int, size: int) -> Twins:
        """``count`` groups of ``size`` rows that lie side by side; size 1 = rows of their own."""
        return cls(first=torch.arange(count) * size, group_of_row=torch.arange(count).repeat_interleave(size))


@dataclass(frozen=True, kw_only=True)
class DenoisedPath:
    """B images' way through the DiT with W stochastic steps."""

    latents: Tensor
    """[B, C, h, w] float32, where it ended."""
    states: Tensor
    """[B, W, C, h, w] float32 before each stochastic step."""
    next_states: Tensor
    """[B, W, C, h, w] float32 after it."""
    means: Tensor
    """[B, W, C, h, w] float32 of the transitions they were drawn from."""
    stds: list[float]
    """[W] standard deviations of those."""


class GlmImage:
    """A pipeline at one size, with the LoRA adapters of the modules that are trained."""

    def __init__(self, pipeline: GlmImagePipeline, config: PolicyConfig, size: tuple[int, int]) -> None:
        """``size``: (height, width) in pixels, multiples of 32. No adapter is attached yet."""
        self.pipeline, self.config, self.size = pipeline, config, size
        self.adapters: dict[Module, Adapter] = {}
        sources = SourceEncoder(pipeline, size)
        self.tokens = TokenModel(
            pipeline.vision_language_encoder,
            pipeline.processor,
            size,
            sources,
            batch=config.rollout_batch,
            share_prefix=config.share_prefix and not config.gradient_checkpointing,
        )
        self.denoiser = Denoiser(
            pipeline, size, sources, denoise_batch=config.denoise_batch, decode_batch=config.decode_batch
        )

    def attach(self, modules: Sequence[Module], seed: int) -> None:
        """Fresh adapters, which change nothing until they are trained; ``seed`` decides their initial values."""
        params = {"ar": self.config.lora, "dit": self.config.dit_lora or self.config.lora}
        for module in modules:
            if module == "ar":
                self.adapters["ar"] = PeftAdapter.attach(
                    self.pipeline.vision_language_encoder, params["ar"], lora.AR_TARGETS, seed
                )
            else:
                self.adapters["dit"] = DitAdapter.attach(self.pipeline.transformer, params["dit"], seed)

    def load(self, folder: Path, modules: Sequence[Module]) -> None:
        """Saved adapters, one folder a module, for sampling only."""
        for module in modules:
            if module == "ar":
                self.adapters["ar"] = PeftAdapter.load(self.pipeline.vision_language_encoder, folder / "ar")
            else:
                self.adapters["dit"] = DitAdapter.load(self.pipeline.transformer, folder / "dit")

    def save_adapters(self, folder: Path) -> None:
        """One folder a module, each in its library's own format."""
        for module, adapter in self.adapters.items():
            adapter.save(folder / module)

    def adapter_state_dict(self) -> dict[str, Tensor]:
        """Every adapter's tensors, as ``module/name``."""
        return {f"{m}/{name}": value for m, adapter in self.adapters.items() for name, value in adapter.state().items()}

    def load_adapter_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Puts tensors of ``adapter_state_dict`` back."""
        for module, adapter in self.adapters.items():
            start = f"{module}/"
            adapter.load_state({k.removeprefix(start): v for k, v in state.items() if k.startswith(start)})

    @torch.no_grad()
    def generate(self, records: Sequence[PromptRecord], seeds: Sequence[int], sampler: SamplerConfig) -> list[Sample]:
        """One uint8 image [3, H, W] a record; each depends on its record, its seed and the weights."""
        kinds: dict[int, list[int]] = {}
        for row, record in enumerate(records):
            kinds.setdefault(len(record.source_images), []).append(row)
        images: dict[int, Sample] = {}
        for rows in kinds.values():
            alike = self._generate_alike([records[row] for row in rows], [seeds[row] for row in rows], sampler)
            images |= dict(zip(rows, alike, strict=True))
        return [images[row] for row in range(len(records))]

    def _generate_alike(
        self, records: Sequence[PromptRecord], seeds: Sequence[int], sampler: SamplerConfig
    ) -> list[Sample]:
        """For records with equally many sources."""
        tokens = self.sample_tokens(records, seeds, sampler).trajectory.tokens
        if not sampler.stochastic:
            return self.decode(tokens, records, seeds, sampler)
        steps = self.window(sampler.steps, torch.Generator().manual_seed(0))
        conditions, alone = self.conditions(tokens, records, sampler), Twins.neighbours(len(records), 1)
        path = self.denoise(conditions, seeds, seeds, sampler.steps, steps, alone)
        return self.denoiser.pixels(path.latents)

    @torch.no_grad()
    def sample_tokens(
        self, records: Sequence[PromptRecord], seeds: Sequence[int], sampler: SamplerConfig
    ) -> SampledTokens:
        """B trajectories under the present adapter, merged into the weights meanwhile."""
        model = self.pipeline.vision_language_encoder.eval()
        drawn_from = self.tokens.sampler(sampler.temperature, sampler.top_p, sampler.top_k)
        with lora.merged(model):
            return self.tokens.sample(records, seeds, drawn_from)

    def decode(
        self, tokens: Tensor, records: Sequence[PromptRecord], noise_seeds: Sequence[int], sampler: SamplerConfig
    ) -> list[Sample]:
        """[B, T] tokens -> B uint8 images [3, H, W] by the ODE, from the start noise of ``noise_seeds``."""
        conditions = self.conditions(tokens, records, sampler)
        with torch.no_grad(), lora.merged(self.pipeline.transformer):
            latents = self.denoiser.integrate(self.denoiser.start_noise(noise_seeds), conditions, sampler.steps)
        return self.denoiser.pixels(latents)

    def conditions(self, tokens: Tensor, records: Sequence[PromptRecord], sampler: SamplerConfig) -> Conditions:
        """Of B rows with generated tokens [B, T]; only the large grid's reach the DiT."""
        grid = self.tokens.grid(source_count(records))
        large = tokens[:, grid.preview_count :].view(-1, *grid.image)
        return self.denoiser.conditions(records, large, sampler.guidance_scale)

    def window(self, steps: int, generator: torch.Generator) -> range:
        """The stochastic ones among ``steps`` denoising steps; a window without a fixed start is drawn."""
        flow = self.config.flow
        count = flow.window_steps or steps - 1 - (flow.window_start or 0)
        start = flow.window_start
        if start is None:
            start = int(torch.randint(steps - count, (1,), generator=generator))
        if not 0 < start + count < steps:
            raise UserError(
                f"policy.flow's window of {count} steps from step {start} does not end before the last of {steps}"
                " denoising steps; lower window_start or window_steps, or raise sampling.rollout.steps"
            )
        return range(start, start + count)

    @torch.no_grad()
    def denoise(
        self,
        conditions: Conditions,
        noise_seeds: Sequence[int],
        step_seeds: Sequence[int],
        steps: int,
        window: range,
        twins: Twins,
    ) -> DenoisedPath:
        """Stochastic steps in ``window``, ODE elsewhere.

        The start noise is that of ``noise_seeds``, the steps' that of ``step_seeds``. The adapter stays unmerged in the
        window, where log-probs must be the replay's to the last bit, and is merged elsewhere.
        """
        schedule = self.denoiser.schedule(steps)
        start = self.denoiser.start_noise(noise_seeds)
        drawn = noises([seed ^ _NOISE_STREAM for seed in step_seeds], len(window), self.denoiser.latent_shape)
        before, after, means, stds = [], [], [], []
        every = torch.arange(len(conditions))
        with lora.merged(self.pipeline.transformer):
            state = self._ode(start[twins.first], conditions, twins.first, schedule, range(window.start))
        mean, std = self._transition(state, conditions, twins.first, schedule, window.start)
        state, mean = state[twins.group_of_row], mean[twins.group_of_row]
        for column, step in enumerate(window):
            if column:
                mean, std = self._transition(state, conditions, every, schedule, step)
            before.append(state)
            state = mean + std * drawn[:, column].to(mean.device)
            after.append(state)
            means.append(mean)
            stds.append(std)
        with lora.merged(self.pipeline.transformer):
            latents = self._ode(state, conditions, every, schedule, range(window.stop, steps))
        return DenoisedPath(
            latents=latents,
            states=torch.stack(before, 1),
            next_states=torch.stack(after, 1),
            means=torch.stack(means, 1),
            stds=stds,
        )

    def _ode(self, state: Tensor, conditions: Conditions, rows: Tensor, schedule: Schedule, steps: range) -> Tensor:
        denoiser = self.denoiser
        return denoiser.batched(state, rows, lambda part, own: denoiser.ode(part, conditions, own, schedule, steps))

    def _transition(
        self, state: Tensor, conditions: Conditions, rows: Tensor, schedule: Schedule, step: int
    ) -> tuple[Tensor, float]:
        """Mean [b, C, h, w] and standard deviation of a stochastic step of ``rows`` ([b])."""
        stds: list[float] = []

        def run(part: Tensor, own: Tensor) -> Tensor:
            mean, std = self.step(part, conditions, own, schedule, step)
            stds.append(std)
            return mean

        return self.denoiser.batched(state, rows, run), stds[0]

    def step(
        self, state: Tensor, conditions: Conditions, rows: Tensor, schedule: Schedule, step: int
    ) -> tuple[Tensor, float]:
        """Mean [b, C, h, w] and standard deviation of a stochastic step of ``rows``, with gradient where it is on."""
        flow = self.config.flow
        sources = self.denoiser.written_sources(conditions, rows)
        velocity = self.denoiser.velocity(state, schedule.timesteps[step], conditions, rows, sources)
        return transition(velocity, state, schedule.sigmas[step], schedule.sigmas[step + 1], flow.noise, flow.sampler)
