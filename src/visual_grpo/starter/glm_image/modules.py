"""Builds the modules of the small GLM-Image: the original classes with about two million parameters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    ConfigMixin,
    FlowMatchEulerDiscreteScheduler,
    GlmImagePipeline,
    GlmImageTransformer2DModel,
)
from torch import Tensor
from transformers import (
    ByT5Tokenizer,
    GenerationConfig,
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    GlmImageProcessor,
    T5Config,
    T5EncoderModel,
)
from transformers.models.glm_image.modeling_glm_image import GlmImageVisionModel, GlmImageVQVAE

from visual_grpo.starter.glm_image.codebook import (
    CELLS,
    CODEBOOK_SIZE,
    FEATURES,
    IMAGE_END,
    IMAGE_START,
    PAD,
    VISION_PATCH,
    VISION_VOCABULARY,
    build_processor,
    standardised,
)
from visual_grpo.starter.glm_image.corpus import PREVIEW_SIDE
from visual_grpo.starter.pretraining import Job

LATENT_CHANNELS = 4
_GLYPH_WIDTH = 32
_TEXT_HIDDEN, _TEXT_HEADS = 128, 4
_VISION_HIDDEN = 64
_EMBEDDING_SCALE = 0.06
"""Standard deviation of the initial image-token embeddings of the AR module (0.02 for its other weights)."""
_SHIFT = 0.5
"""Subtracted from both features and codes: distances do not change, norms become smaller."""


def build_ar(processor: GlmImageProcessor, codebook: Tensor, seed: int) -> GlmImageForConditionalGeneration:
    """The AR module with its vision tower set; similar-looking image tokens start with similar embeddings."""
    torch.manual_seed(seed)
    model = GlmImageForConditionalGeneration(_ar_config(processor)).eval()
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.9,
        top_p=0.75,
        top_k=0,
        eos_token_id=IMAGE_END,
        pad_token_id=PAD,
        suppress_tokens=list(range(CODEBOOK_SIZE, VISION_VOCABULARY)),  # the decoder has no embedding for them
    )
    visual, vqmodel, images = model.model.visual, model.model.vqmodel, processor.image_processor
    start = standardised(codebook) * _EMBEDDING_SCALE
    with torch.no_grad():
        _set_patch_means(visual, images.image_mean, images.image_std)
        _set_nearest_code(vqmodel, codebook)
        for weight in (model.model.language_model.embed_tokens.weight, model.lm_head.weight):
            weight[:CODEBOOK_SIZE, :FEATURES] = start
    visual.requires_grad_(False)
    vqmodel.requires_grad_(False)
    return model


def build_dit(codebook: Tensor, seed: int) -> GlmImageTransformer2DModel:
    torch.manual_seed(seed)
    model = GlmImageTransformer2DModel(
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=3,
        num_attention_heads=4,
        attention_head_dim=32,
        text_embed_dim=_GLYPH_WIDTH,
        time_embed_dim=64,
        condition_dim=16,
        prior_vq_quantizer_codebook_size=CODEBOOK_SIZE,
    )
    with torch.no_grad():
        model.prior_token_embedding.weight[:, :FEATURES] = standardised(codebook)
    return model.eval()


def build_vae(height: int, width: int, seed: int) -> AutoencoderKL:
    torch.manual_seed(seed)
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 16, 16, 16),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=1,
        sample_size=max(height, width),
        latents_mean=(0.0,) * LATENT_CHANNELS,
        latents_std=(1.0,) * LATENT_CHANNELS,
        mid_block_add_attention=False,
    ).eval()


def build_glyph_encoder(seed: int) -> T5EncoderModel:
    """The glyph encoder, which stays untrained: without quoted text its output is a constant."""
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=384,
        d_model=_GLYPH_WIDTH,
        d_kv=16,
        d_ff=64,
        num_layers=1,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )
    return T5EncoderModel(config).eval()


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000,
        shift=1.0,
        use_dynamic_shifting=True,
        time_shift_type="linear",
        base_shift=0.25,
        max_shift=0.75,
        base_image_seq_len=256,
    )


def save_pipeline(job: Job, folder: Path) -> None:
    """Saves the trained modules with the fixed ones as a GlmImagePipeline; removes the modules' own folders."""

    def saved(module: Any, name: str) -> Any:
        loaded = module.from_pretrained(job.folder / name, use_safetensors=True)
        if isinstance(loaded, ConfigMixin):  # diffusers saves where it was loaded from: a draft of this process.
            loaded.register_to_config(_name_or_path="")
        return loaded

    pipeline = GlmImagePipeline(
        tokenizer=ByT5Tokenizer(),
        processor=build_processor(job.task),
        text_encoder=build_glyph_encoder(job.seed),
        vision_language_encoder=saved(GlmImageForConditionalGeneration, "vision_language_encoder"),
        vae=saved(AutoencoderKL, "vae"),
        transformer=saved(GlmImageTransformer2DModel, "transformer"),
        scheduler=build_scheduler(),
    )
    pipeline.save_pretrained(folder)
    (folder / "visual_grpo.json").write_text(json.dumps({"preview_side": PREVIEW_SIDE}), encoding="utf-8")
    shutil.rmtree(job.folder)


def _ar_config(processor: GlmImageProcessor) -> GlmImageConfig:
    half_head = _TEXT_HIDDEN // _TEXT_HEADS // 2
    temporal = half_head // 4
    height = (half_head - temporal) // 2
    return GlmImageConfig(
        text_config={
            "vocab_size": len(processor.tokenizer),
            "hidden_size": _TEXT_HIDDEN,
            "intermediate_size": 3 * _TEXT_HIDDEN,
            "num_hidden_layers": 3,
            "num_attention_heads": _TEXT_HEADS,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "vision_vocab_size": VISION_VOCABULARY,
            "pad_token_id": PAD,
            "eos_token_id": IMAGE_END,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [temporal, height, half_head - temporal - height],
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": _VISION_HIDDEN,
            "num_heads": 2,
            "image_size": 64,
            "patch_size": VISION_PATCH,
            "intermediate_size": 2 * _VISION_HIDDEN,
        },
        vq_config={"embed_dim": _VISION_HIDDEN, "num_embeddings": CODEBOOK_SIZE, "latent_channels": _VISION_HIDDEN},
        image_token_id=processor.image_token_id,
        image_start_token_id=IMAGE_START,
        image_end_token_id=IMAGE_END,
    )


def _set_patch_means(tower: GlmImageVisionModel, mean: list[float], std: list[float]) -> None:
    """Channel (cell, colour) = mean of that cell with the normalisation undone; channel 48 is the constant 1."""
    for block in tower.blocks:
        for layer in (block.attn.proj, block.mlp.fc2):  # makes every residual branch output 0
            layer.weight.zero_()
            layer.bias.zero_()
    tower.embeddings.position_embedding.weight.zero_()
    weight, bias = tower.patch_embed.proj.weight.zero_(), tower.patch_embed.proj.bias.zero_()
    side = VISION_PATCH // CELLS
    for row in range(CELLS):
        for column in range(CELLS):
            for color in range(3):
                channel = (row * CELLS + column) * 3 + color
                cell = weight[channel, color, row * side : (row + 1) * side, column * side : (column + 1) * side]
                cell.fill_(std[color] / side**2)
                bias[channel] = mean[color] - _SHIFT
    bias[FEATURES] = 1.0


def _set_nearest_code(vqmodel: GlmImageVQVAE, codebook: Tensor) -> None:
    """Makes the argmax of the quantiser's cosine similarity equal the argmin of the L2 distance ``|f - c|^2``.

    The quantiser normalises features and codes. With f' = (f, 1) and c' = (c, (m - |c|^2) / 2, r), where r gives all
    c' the same norm, the cosine of f' and c' increases with f.c - |c|^2 / 2, that is, decreases with the distance.
    """
    vqmodel.quant_conv.weight.zero_()
    vqmodel.quant_conv.bias.zero_()
    for channel in range(FEATURES + 1):
        vqmodel.quant_conv.weight[channel, channel] = 1.0
    codes = codebook - _SHIFT
    square = codes.square().sum(1)
    embedding = vqmodel.quantize.embedding.weight.zero_()
    embedding[:, :FEATURES] = codes
    embedding[:, FEATURES] = (square.max() - square) / 2
    norm = embedding.square().sum(1)
    embedding[:, FEATURES + 1] = (norm.max() - norm).sqrt()
