"""The small Stable Diffusion 3."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor
from transformers import CLIPTextModelWithProjection

from visual_grpo.starter.flow import LATENT_PIXELS, SmallFlowModel, pretrain_flow, zero_layers
from visual_grpo.starter.glm_image.modules import LATENT_CHANNELS
from visual_grpo.starter.pretraining import Advance, Job
from visual_grpo.starter.text_encoders import CLIP_WIDTH, build_clip, build_tokenizer

SHIFT = 1.5
_PATCH = 4
"""Latents a side of a token. A patch of 2, as in the released model, learns less in the same CPU time."""
_LAYERS, _HEADS, _HEAD_WIDTH = 4, 4, 32
_CLIP_SEEDS = (10, 11)


def build_pipeline(vae: AutoencoderKL, longer_side: int, seed: int) -> StableDiffusion3Pipeline:
    """The pipeline without T5, for images up to ``longer_side`` pixels a side; its transformer is untrained."""
    tokenizer = build_tokenizer()
    first, second = (build_clip(CLIPTextModelWithProjection, tokenizer, seed + offset) for offset in _CLIP_SEEDS)
    pipeline = StableDiffusion3Pipeline(
        transformer=build_transformer(longer_side, seed),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=vae,
        text_encoder=first,
        tokenizer=tokenizer,
        text_encoder_2=second,
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def build_transformer(longer_side: int, seed: int) -> SD3Transformer2DModel:
    """Builds the transformer for images of at most ``longer_side`` pixels a side.

    Every block starts as the identity, and the output as 0.
    """
    torch.manual_seed(seed)
    latents = longer_side // LATENT_PIXELS
    model = SD3Transformer2DModel(
        sample_size=latents,
        patch_size=_PATCH,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=_LAYERS,
        attention_head_dim=_HEAD_WIDTH,
        num_attention_heads=_HEADS,
        joint_attention_dim=2 * CLIP_WIDTH,
        caption_projection_dim=_HEADS * _HEAD_WIDTH,
        pooled_projection_dim=2 * CLIP_WIDTH,
        pos_embed_max_size=latents // _PATCH,
        qk_norm="rms_norm",
    )
    zero_layers(model, "norm1.linear", "norm1_context.linear", "^proj_out")
    return model.eval()


def encode(pipeline: StableDiffusion3Pipeline, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """[N, L, D] and pooled [N, P], with none of the zeros that stand for T5's tokens by default."""
    embeds, _, pooled, _ = pipeline.encode_prompt(
        list(prompts), None, None, do_classifier_free_guidance=False, max_sequence_length=0
    )
    return embeds, pooled


def velocity(
    dit: SD3Transformer2DModel, noisy: Tensor, sigma: Tensor, texts: tuple[Tensor, Tensor], rows: Sequence[int]
) -> Tensor:
    embeds, pooled = texts
    return dit(
        hidden_states=noisy,
        timestep=sigma * 1000,
        encoder_hidden_states=embeds[rows],
        pooled_projections=pooled[rows],
        return_dict=False,
    )[0]


SMALL_SD3 = SmallFlowModel(build=build_pipeline, encode=encode, velocity=velocity, shift=SHIFT)


def pretrain_sd3(job: Job, advance: Advance) -> None:
    pretrain_flow(SMALL_SD3, job, advance)
