"""The small Stable Diffusion 3, FLUX.1 (with distilled guidance, as dev has it) and Z-Image."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from torch import Tensor
from transformers import CLIPTextModel, CLIPTextModelWithProjection, PreTrainedTokenizerFast

from examples.flow_models.pretrain import SmallFlowModel, pretrain_flow, zero_layers
from examples.flow_models.text_encoders import (
    CLIP_WIDTH,
    PROMPT_TOKENS,
    QWEN3_WIDTH,
    T5_WIDTH,
    build_clip,
    build_qwen3,
    build_t5,
    build_tokenizer,
)
from visual_grpo.models.flow.parts import packed, unpacked
from visual_grpo.starter.glm_image.modules import LATENT_CHANNELS

_TEXT_SEED = 10
"""Added to the seed of the transformer for the first text encoder, and one more for the second."""
_HEADS, _HEAD_WIDTH = 4, 32
_SD3_SHIFT, _Z_IMAGE_SHIFT = 1.5, 6.0
"""Shifts of the schedulers; released Z-Image has 6, Turbo 3."""
_LATENT_PIXELS, _SD3_PATCH = 8, 4
"""Pixels a side of a latent, and latents a side of a token: SD3's patch of 2 learns less in the same CPU time."""
_GUIDANCE = 1.0
"""The scale that FLUX is pretrained with, and the one of conf/flux_small."""


def build_sd3(
    vae: AutoencoderKL, longer_side: int, seed: int, tokenizer: PreTrainedTokenizerFast | None = None, **sizes: int
) -> StableDiffusion3Pipeline:
    """The pipeline without T5, for images up to ``longer_side`` pixels a side; its transformer is untrained.

    ``sizes``: of the transformer, in the place of the small one's.
    """
    tokenizer = tokenizer or build_tokenizer()
    return StableDiffusion3Pipeline(
        transformer=build_sd3_transformer(longer_side, seed, **sizes),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=_SD3_SHIFT),
        vae=vae,
        text_encoder=build_clip(CLIPTextModelWithProjection, tokenizer, seed + _TEXT_SEED),
        tokenizer=tokenizer,
        text_encoder_2=build_clip(CLIPTextModelWithProjection, tokenizer, seed + _TEXT_SEED + 1),
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )


def build_sd3_transformer(
    longer_side: int,
    seed: int,
    *,
    layers: int = 4,
    heads: int = _HEADS,
    head: int = _HEAD_WIDTH,
    patch: int = _SD3_PATCH,
) -> SD3Transformer2DModel:
    torch.manual_seed(seed)
    latents = longer_side // _LATENT_PIXELS
    model = SD3Transformer2DModel(
        sample_size=latents,
        patch_size=patch,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=layers,
        attention_head_dim=head,
        num_attention_heads=heads,
        joint_attention_dim=2 * CLIP_WIDTH,
        caption_projection_dim=heads * head,
        pooled_projection_dim=2 * CLIP_WIDTH,
        pos_embed_max_size=latents // patch,
        qk_norm="rms_norm",
    )
    zero_layers(model, "norm1.linear", "norm1_context.linear", "^proj_out")
    return model.eval()


def _encode_sd3(pipeline: StableDiffusion3Pipeline, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """[N, L, D] and pooled [N, P], with none of the zeros that stand for T5's tokens by default."""
    embeds, _, pooled, _ = pipeline.encode_prompt(
        list(prompts), None, None, do_classifier_free_guidance=False, max_sequence_length=0
    )
    return embeds, pooled


def _sd3_velocity(
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


def build_flux(
    vae: AutoencoderKL,
    seed: int,
    tokenizer: PreTrainedTokenizerFast,
    pipeline: type[FluxPipeline | FluxKontextPipeline] = FluxPipeline,
) -> Any:
    """The pipeline with an untrained transformer, which takes images of any size."""
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
        axes_dims_rope=(4, 14, 14),
    )
    zero_layers(model, "norm1.linear", "norm1_context.linear", ".norm.linear", "^proj_out")
    return pipeline(
        transformer=model.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae,
        text_encoder=build_clip(CLIPTextModel, tokenizer, seed + _TEXT_SEED),
        tokenizer=tokenizer,
        text_encoder_2=build_t5(len(tokenizer), seed + _TEXT_SEED + 1),
        tokenizer_2=tokenizer,
    )


def encode_flux(pipeline: Any, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Returns T5's tokens [N, L, D] and CLIP's pooled embeddings [N, P]."""
    embeds, pooled, _ = pipeline.encode_prompt(list(prompts), None, max_sequence_length=PROMPT_TOKENS)
    return embeds, pooled


def flux_velocity(
    dit: FluxTransformer2DModel,
    noisy: Tensor,
    sigma: Tensor,
    texts: tuple[Tensor, Tensor],
    rows: Sequence[int],
    sources: Tensor | None = None,
) -> Tensor:
    """``sources``: latents like ``noisy``, of the images that Kontext edits."""
    (embeds, pooled), (count, _, h, w) = texts, noisy.shape
    tokens = packed(noisy)
    ids = FluxPipeline._prepare_latent_image_ids(count, h // 2, w // 2, noisy.device, noisy.dtype)
    if sources is not None:
        tokens = torch.cat([tokens, packed(sources)], 1)
        ids = torch.cat([ids, ids + torch.tensor([1, 0, 0])])  # A source is at time 1.
    velocity = dit(
        hidden_states=tokens,
        timestep=sigma,
        guidance=torch.full((count,), _GUIDANCE),
        encoder_hidden_states=embeds[rows],
        pooled_projections=pooled[rows],
        txt_ids=torch.zeros(embeds.shape[1], 3),
        img_ids=ids,
        return_dict=False,
    )[0]
    return unpacked(velocity[:, : h * w // 4], h)


def _build_z_image(vae: AutoencoderKL, longer_side: int, seed: int) -> ZImagePipeline:
    """The pipeline with an untrained transformer, which takes images of any size."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    torch.manual_seed(seed)
    model = ZImageTransformer2DModel(
        in_channels=LATENT_CHANNELS,
        dim=_HEADS * _HEAD_WIDTH,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=_HEADS,
        n_kv_heads=_HEADS,
        cap_feat_dim=QWEN3_WIDTH,
        axes_dims=[8, 12, 12],
        axes_lens=[64, 64, 64],
    )
    zero_layers(model, ".adaLN_modulation.0", "^all_final_layer.2-1.linear")
    return ZImagePipeline(
        transformer=model.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=_Z_IMAGE_SHIFT),
        vae=vae,
        text_encoder=build_qwen3(tokenizer, seed + _TEXT_SEED),
        tokenizer=tokenizer,
    )


def _encode_z_image(pipeline: ZImagePipeline, prompts: Sequence[str]) -> list[Tensor]:
    """Returns N of [length, D]."""
    texts, _ = pipeline.encode_prompt(
        list(prompts), do_classifier_free_guidance=False, max_sequence_length=PROMPT_TOKENS
    )
    return texts


def _z_image_velocity(
    dit: ZImageTransformer2DModel, noisy: Tensor, sigma: Tensor, texts: list[Tensor], rows: Sequence[int]
) -> Tensor:
    """The transformer takes the share of the image and predicts image minus noise."""
    images = dit(list(noisy[:, :, None]), 1 - sigma, [texts[row] for row in rows], return_dict=False)[0]
    return -torch.stack(images).squeeze(2)


SMALL_SD3 = SmallFlowModel(build=build_sd3, encode=_encode_sd3, velocity=_sd3_velocity, shift=_SD3_SHIFT)
FLUX_SHIFT = 1.6
"""The scheduler shifts by the number of image tokens: by 1.6 at 128 x 128 pixels."""
_SMALL_Z_IMAGE = SmallFlowModel(
    build=_build_z_image, encode=_encode_z_image, velocity=_z_image_velocity, shift=_Z_IMAGE_SHIFT
)
_SMALL_FLUX = SmallFlowModel(
    build=lambda vae, longer_side, seed: build_flux(vae, seed, build_tokenizer()),
    encode=encode_flux,
    velocity=flux_velocity,
    shift=FLUX_SHIFT,
)
pretrain_sd3 = partial(pretrain_flow, SMALL_SD3)
pretrain_flux = partial(pretrain_flow, _SMALL_FLUX)
pretrain_z_image = partial(pretrain_flow, _SMALL_Z_IMAGE)
