"""The small Qwen2.5-VL: the original classes with about half a million parameters."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from examples.scenes.scenes import ANSWER_PIECES, WORDS

PATCH, MERGE = 8, 2
"""Pixels per side of a patch of the vision tower, and patches per side that are merged into one language token."""
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message.role + '\\n' }}"
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif part.type == 'text' -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)
_HIDDEN, _HEADS, _VISION_LAYERS = 96, 4, 2
_SPREAD = 3.0
"""Factor on all initial matrices: transformers' initialisation is for large models."""


def build_processor(height: int, width: int) -> Qwen2_5_VLProcessor:
    """The processor for images of one size in pixels."""
    image_processor = Qwen2VLImageProcessor(
        patch_size=PATCH,
        temporal_patch_size=2,
        merge_size=MERGE,
        size={"shortest_edge": height * width, "longest_edge": height * width},
    )
    return Qwen2_5_VLProcessor(
        image_processor=image_processor,
        tokenizer=_build_tokenizer(max(height, width)),
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=_CHAT_TEMPLATE,
    )


def _build_tokenizer(longer_side: int) -> PreTrainedTokenizerFast:
    """Bytes, so that any text can be encoded, and tokens for the words of queries and answers and for each number."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",  # noqa: S106  # text tokens, not secrets
        pad_token="<|endoftext|>",  # noqa: S106
        extra_special_tokens={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            **{f"{name[2:-2]}_token": name for name in ("<|im_start|>", "<|vision_start|>", "<|vision_end|>")},
        },
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.add_tokens([*ANSWER_PIECES, "user", "assistant", *WORDS, *map(str, range(longer_side))])
    return fast


def build_model(processor: Qwen2_5_VLProcessor, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(_config(processor)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(_SPREAD)
    tokenizer = processor.tokenizer
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def _config(processor: Qwen2_5_VLProcessor) -> Qwen2_5_VLConfig:
    tokenizer, head = processor.tokenizer, _HIDDEN // _HEADS
    special = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    image, video, start, end = tokenizer.convert_tokens_to_ids(special)
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": _HIDDEN,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": _HEADS,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10.0, "mrope_section": [head // 6] * 3},
        },
        vision_config={
            "depth": _VISION_LAYERS,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "window_size": 1024,
            "out_hidden_size": _HIDDEN,
            "fullatt_block_indexes": list(range(_VISION_LAYERS)),
            "tokens_per_second": 2,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 30.0},
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )
