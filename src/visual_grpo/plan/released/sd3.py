"""Stable Diffusion 3.5 medium (stabilityai/stable-diffusion-3.5-medium): sizes of its published configuration files."""

from __future__ import annotations

from typing import Any

import torch

from visual_grpo.plan.released.weightless import frozen
from visual_grpo.plan.released.words import word_tokenizer

_CLIP_TOKENS, _T5_TOKENS = 77, 512


def build(path: str, dtype: torch.dtype) -> Any:
    """A ``StableDiffusion3Pipeline`` with T5, as ``policies.sd3.family.load`` gives it."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

    pipeline = StableDiffusion3Pipeline(
        transformer=frozen(lambda: SD3Transformer2DModel(**_TRANSFORMER), dtype),
        vae=frozen(lambda: AutoencoderKL(**_VAE), dtype),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=frozen(lambda: CLIPTextModelWithProjection(CLIPTextConfig(**_CLIP_L)), dtype),
        text_encoder_2=frozen(lambda: CLIPTextModelWithProjection(CLIPTextConfig(**_CLIP_G)), dtype),
        text_encoder_3=frozen(lambda: T5EncoderModel(T5Config(**_T5)), dtype),
        tokenizer=_clip_tokenizer(),
        tokenizer_2=_clip_tokenizer(),
        tokenizer_3=word_tokenizer({"<pad>": 0, "</s>": 1}, pad="<pad>", eos="</s>", longest=_T5_TOKENS),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _clip_tokenizer() -> Any:
    special = {"<|startoftext|>": 49406, "<|endoftext|>": 49407}
    return word_tokenizer(
        special, pad="<|endoftext|>", eos="<|endoftext|>", bos="<|startoftext|>", longest=_CLIP_TOKENS
    )


_TRANSFORMER: dict[str, Any] = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 384,
    "dual_attention_layers": tuple(range(13)),
    "qk_norm": "rms_norm",
}
_VAE: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
    "scaling_factor": 1.5305,
    "shift_factor": 0.0609,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "sample_size": 1024,
}
_CLIP_L: dict[str, Any] = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "projection_dim": 768,
}
_CLIP_G: dict[str, Any] = {
    "vocab_size": 49408,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
    "hidden_act": "gelu",
}
_T5: dict[str, Any] = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
