"""Qwen2.5-VL (Qwen/Qwen2.5-VL-3B-Instruct and -7B-Instruct): sizes of their published configuration files."""

from __future__ import annotations

from typing import Any

import torch

from visual_grpo.plan.released.weightless import frozen
from visual_grpo.plan.released.words import word_tokenizer

SPECIAL = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|vision_pad|>": 151654,
    "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
}
_TEXT: dict[str, dict[str, Any]] = {
    "3B": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
    },
    "7B": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
}
_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if loop.first -%}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{%- endif -%}"
    "<|im_start|>{{ message.role + '\\n' }}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif part.type == 'text' -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)


def build(path: str, dtype: torch.dtype) -> Any:
    """Model and processor, as ``policies.qwen2_5_vl.family.load`` gives them."""
    from transformers import GenerationConfig, Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    model = network("3B" if "-3B-" in path else "7B", dtype)
    ends = [SPECIAL["<|im_end|>"], SPECIAL["<|endoftext|>"]]
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1e-6, top_p=1.0, eos_token_id=ends, pad_token_id=SPECIAL["<|endoftext|>"]
    )
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(),
        tokenizer=tokenizer(),
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=_TEMPLATE,
    )
    return model, processor


def network(size: str, dtype: torch.dtype) -> Any:
    """The one of 3B or 7B parameters, without weights."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text = {**_TEXT[size], "rope_parameters": rope, "max_position_embeddings": 128000}
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config={"hidden_size": 1280, "out_hidden_size": text["hidden_size"], "tokens_per_second": 2},
        image_token_id=SPECIAL["<|image_pad|>"],
        video_token_id=SPECIAL["<|video_pad|>"],
        vision_start_token_id=SPECIAL["<|vision_start|>"],
        vision_end_token_id=SPECIAL["<|vision_end|>"],
        tie_word_embeddings=size == "3B",
    )
    return frozen(lambda: Qwen2_5_VLForConditionalGeneration(config), dtype)


def tokenizer() -> Any:
    return word_tokenizer(
        SPECIAL,
        pad="<|endoftext|>",
        eos="<|im_end|>",
        longest=131072,
        named={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
        },
        padding_side="left",
    )
