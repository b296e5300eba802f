"""Qwen-Image's pipelines of the real classes, small and with random weights."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.families.sd3.tiny import frozen

SIZE = (64, 96)
MARKS = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


def pipeline(*, edit: bool = False, plus: bool = False, zero_cond_t: bool = False) -> Any:
    """``zero_cond_t``: the transformer reads sources at timestep 0, as 2511's does."""
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        QwenImageEditPipeline,
        QwenImageEditPlusPipeline,
        QwenImagePipeline,
    )

    torch.set_num_threads(1)
    words = tokenizer()
    parts = {
        "scheduler": FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
        ),
        "vae": vae(),
        "text_encoder": text_encoder(words),
        "transformer": transformer(zero_cond_t),
    }
    if edit or plus:
        kind = QwenImageEditPlusPipeline if plus else QwenImageEditPipeline
        return frozen(kind(**parts, tokenizer=words, processor=processor(words)))
    return frozen(QwenImagePipeline(**parts, tokenizer=words))


def tokenizer() -> Any:
    """One token a byte."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Qwen2Tokenizer(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    words.add_special_tokens({"extra_special_tokens": MARKS})
    return words


def text_encoder(words: Any) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    ids = dict(zip(MARKS, words.convert_tokens_to_ids(MARKS), strict=True))
    text = {
        "vocab_size": len(words),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        "pad_token_id": words.pad_token_id,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
        "window_size": 56,
    }
    torch.manual_seed(1)
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config=text,
            vision_config=vision,
            image_token_id=ids["<|image_pad|>"],
            video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
        )
    )


def processor(words: Any) -> Any:
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    smallest = {"min_pixels": 28 * 28, "max_pixels": 128 * 128}
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**smallest),
        tokenizer=words,
        video_processor=Qwen2VLVideoProcessor(**smallest),
    )


def transformer(zero_cond_t: bool = False) -> Any:
    from diffusers import QwenImageTransformer2DModel

    torch.manual_seed(0)
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
        zero_cond_t=zero_cond_t,
    )


def vae() -> Any:
    from diffusers import AutoencoderKLQwenImage

    torch.manual_seed(2)
    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[-0.7571, -0.7089, -0.9113, 0.1075],
        latents_std=[2.8184, 1.4541, 2.3275, 2.6558],
    )


def opened(record: Any) -> Any:
    from PIL import Image

    return Image.open(record.source_images[0])
