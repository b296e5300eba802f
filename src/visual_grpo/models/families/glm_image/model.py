"""GLM-Image as one model of two stages: the AR module writes image tokens, the DiT turns them into a picture."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from visual_grpo.common.phases import phase
from visual_grpo.common.types import JointRollout, PromptRecord, Sample, Share
from visual_grpo.config import ModelConfig, SamplerConfig
from visual_grpo.models.families.glm_image.decoder import DecoderConditions, GlmImageDecoder
from visual_grpo.models.families.glm_image.processor import PreviewProcessor, preview_side
from visual_grpo.models.families.glm_image.source_images import SourceEncoder
from visual_grpo.models.families.glm_image.token_model import GlmImageTokens
from visual_grpo.models.family import Family
from visual_grpo.models.flow.denoising import Denoiser
from visual_grpo.models.flow.flow_policy import FlowPolicy
from visual_grpo.models.loading import load_pipeline
from visual_grpo.models.lora import DiffusersAdapter, PeftAdapter
from visual_grpo.models.model import Model
from visual_grpo.models.module import ModelSettings, Module
from visual_grpo.models.tokens.generation import SampledTokens
from visual_grpo.models.tokens.probabilities import TokenSampler
from visual_grpo.models.tokens.prompt_cache import Prompts
from visual_grpo.models.tokens.token_policy import TokenPolicy, sample_with_adapter

if TYPE_CHECKING:
    from diffusers import GlmImagePipeline

MODULES = {
    "ar": Module(
        kind="tokens",
        adapter=PeftAdapter,
        targets=r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_up_proj|down_proj)",
        advice=(
            "a reward that sees what the tokens decide; a higher sampling.rollout.temperature; more"
            " grpo.prompts_per_step"
        ),
    ),
    "dit": Module(
        kind="flow",
        adapter=DiffusersAdapter,
        targets=["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"],
        advice=(
            "a reward that sees what the denoising steps decide (detail, colour, text); policy.flow.noise between .4"
            " and 1; an earlier window (policy.flow.window_start=0); policy.share_start_noise=true; more prompts rather"
            " than more decodes (modules.dit.prompts_per_step, modules.dit.group_size)"
        ),
    ),
}


class GlmImage(Model):
    """A pipeline at one image size."""

    def __init__(self, pipeline: GlmImagePipeline, settings: ModelSettings) -> None:
        self.pipeline, self.size = pipeline, settings.size
        self.sources = SourceEncoder(pipeline, settings.size)
        super().__init__(pipeline, MODULES, settings)

    def networks(self) -> dict[str, Any]:
        return {"ar": self.pipeline.vision_language_encoder, "dit": self.pipeline.transformer}

    def part(self, module: str, sampler: SamplerConfig) -> GlmImageTokens | GlmImageDecoder:
        """``ar``: token samples, each decoded by the ODE. ``dit``: decodes of one token sample of each prompt."""
        if module == "dit":
            return self.decoder(sampler)
        guidance = self.config.decode_guidance_scale or sampler.guidance_scale
        return self.tokens(sampler.model_copy(update={"guidance_scale": guidance}))

    def joint_policy(self, outer: Any, inner: Any) -> GlmImageJointPolicy:
        """The AR module's policy outside, the DiT's inside."""
        return GlmImageJointPolicy(outer, inner)

    def tokens(self, decoded_by: SamplerConfig) -> GlmImageTokens:
        """The first stage, whose samples are decoded as ``decoded_by`` says."""

        def decode(records: Sequence[PromptRecord], tokens: Tensor, seeds: Sequence[int]) -> list[Sample]:
            decoder = self.decoder(decoded_by)
            grids = self._stage_one().image_tokens(tokens, records)
            conditions = decoder.conditions_of(records, grids, decoded_by.denoising()[1], seeds)
            return self.denoiser(decoder).generate(conditions, seeds, decoded_by)

        return self._stage_one(decode)

    def decoder(self, tokens_by: SamplerConfig) -> GlmImageDecoder:
        """The second stage, whose tokens are sampled as ``tokens_by`` says."""

        def sample(records: Sequence[PromptRecord], seeds: Sequence[int]) -> Tensor:
            tokens = self.sample_tokens(records, seeds, tokens_by).trajectory.tokens
            return self._stage_one().image_tokens(tokens, records)

        return GlmImageDecoder(self.pipeline, self.size, self.sources, sample)

    def sample_tokens(
        self, records: Sequence[PromptRecord], seeds: Sequence[int], sampler: SamplerConfig
    ) -> SampledTokens[Prompts]:
        """B trajectories under the present adapter."""
        return sample_with_adapter(self._stage_one(), records, seeds, sampler, self.config)

    def denoiser(self, decoder: GlmImageDecoder) -> Denoiser[DecoderConditions]:
        return Denoiser(decoder, self.config)

    def _stage_one(self, decode: Any = None) -> GlmImageTokens:
        network, processor = self.pipeline.vision_language_encoder, self.pipeline.processor
        return GlmImageTokens(network, processor, self.size, self.sources, decode)


class GlmImageJointPolicy:
    """The DiT decodes the very tokens that AR is trained on."""

    def __init__(self, ar: TokenPolicy[Prompts], dit: FlowPolicy[DecoderConditions]) -> None:
        """Two policies on one ``GlmImage``."""
        self.ar, self.dit = ar, dit

    @phase("prompts and conditions")
    @torch.no_grad()
    def joint_rollout(
        self,
        prompts: Sequence[PromptRecord],
        outer_size: int,
        inner_size: int,
        generator: torch.Generator,
        share: Share | None = None,
    ) -> JointRollout:
        """A token samples of each prompt, D stochastic decodes of each."""
        started = time.perf_counter()
        groups = self.ar.sample(prompts, outer_size, generator, share)
        seconds = time.perf_counter() - started
        tokens, decoder = self.ar.model, self.dit.model
        assert isinstance(tokens, GlmImageTokens)
        assert isinstance(decoder, GlmImageDecoder)
        grids = tokens.image_tokens(groups.sampled.trajectory.tokens, groups.records)
        conditions = decoder.conditions_of(groups.records, grids, self.dit.guidance_scale)
        inner = self.dit.decode(groups.records, conditions, groups.decode_seeds, inner_size, generator, share)
        outer = self.ar.as_rollout(groups, inner.samples[::inner_size], {"seconds/tokens": seconds})
        return JointRollout(outer=outer, inner=inner)


def load(path: str, config: ModelConfig) -> GlmImagePipeline:
    """A folder or hub id, frozen; with the preview size that a small model's folder says."""

    def prepare(pipeline: GlmImagePipeline) -> None:
        pipeline.vae.to(memory_format=torch.channels_last)  # 3x faster convolutions on a CPU.

    pipeline = load_pipeline("GlmImagePipeline", path, config, prepare=prepare)
    pipeline.processor = PreviewProcessor.of(pipeline.processor, preview_side(path))
    network = pipeline.vision_language_encoder
    TokenSampler.warn_of_what_is_not_applied(network.generation_config, path, network.config.vq_config.num_embeddings)
    return pipeline


FAMILY = Family(
    name="glm_image",
    modules=MODULES,
    tasks=("t2i", "i2i", "mixed"),
    saved_as=("GlmImagePipeline",),
    load=load,
    build=GlmImage,
)
