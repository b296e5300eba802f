"""The small FLUX.1, with guidance distilled into the transformer as FLUX.1 dev has it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from torch import Tensor
from transformers import CLIPTextModel

from visual_grpo.models.flow_parts import packed, unpacked
from visual_grpo.starter.flow import SmallFlowModel, pretrain_flow, zero_layers
from visual_grpo.starter.glm_image.modules import LATENT_CHANNELS
from visual_grpo.starter.pretraining import Advance, Job
from visual_grpo.starter.text_encoders import CLIP_WIDTH, PROMPT_TOKENS, T5_WIDTH, build_clip, build_t5, build_tokenizer

_HEADS, _HEAD_WIDTH = 4, 32
_ROTARY_WIDTHS = (4, 14, 14)
_CLIP_SEED, _T5_SEED = 10, 11
_GUIDANCE = 1.0
"""The scale that the transformer is pretrained with, and the one of conf/flux_small."""


def build_pipeline(vae: AutoencoderKL, longer_side: int, seed: int) -> FluxPipeline:
    """The pipeline with an untrained transformer, which takes images of any size."""
    tokenizer = build_tokenizer()
    pipeline = FluxPipeline(
        transformer=build_transformer(seed),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae,
        text_encoder=build_clip(CLIPTextModel, tokenizer, seed + _CLIP_SEED),
        tokenizer=tokenizer,
        text_encoder_2=build_t5(len(tokenizer), seed + _T5_SEED),
        tokenizer_2=tokenizer,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def build_transformer(seed: int) -> FluxTransformer2DModel:
    torch.manual_seed(seed)
    model = FluxTransformer2DModel(
        in_channels=4 * LATENT_CHANNELS,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=_HEAD_WIDTH,
        num_attention_heads=_HEADS,
        joint_attention_dim=T5_WIDTH,
        pooled_projection_dim=CLIP_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=_ROTARY_WIDTHS,
    )
    zero_layers(model, "norm1.linear", "norm1_context.linear", ".norm.linear", "^proj_out")
    return model.eval()


def encode(pipeline: FluxPipeline, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Returns T5's tokens [N, L, D] and CLIP's pooled embeddings [N, P]."""
    embeds, pooled, _ = pipeline.encode_prompt(list(prompts), None, max_sequence_length=PROMPT_TOKENS)
    return embeds, pooled


def velocity(
    dit: FluxTransformer2DModel, noisy: Tensor, sigma: Tensor, texts: tuple[Tensor, Tensor], rows: Sequence[int]
) -> Tensor:
    (embeds, pooled), (count, _, h, w) = texts, noisy.shape
    tokens = dit(
        hidden_states=packed(noisy),
        timestep=sigma,
        guidance=torch.full((count,), _GUIDANCE),
        encoder_hidden_states=embeds[rows],
        pooled_projections=pooled[rows],
        txt_ids=torch.zeros(embeds.shape[1], 3),
        img_ids=FluxPipeline._prepare_latent_image_ids(count, h // 2, w // 2, noisy.device, noisy.dtype),
        return_dict=False,
    )[0]
    return unpacked(tokens, h)


_SMALL_FLUX = SmallFlowModel(build=build_pipeline, encode=encode, velocity=velocity, shift=1.6)
"""The scheduler shifts by the number of image tokens: by 1.6 at 128 x 128 pixels."""


def pretrain_flux(job: Job, advance: Advance) -> None:
    pretrain_flow(_SMALL_FLUX, job, advance)
