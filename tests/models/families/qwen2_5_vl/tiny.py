"""A Qwen2.5-VL and a Qwen3-VL of the real classes, small and with random weights."""

from __future__ import annotations

from pathlib import Path

import torch

from examples.scenes.small_qwen2_5_vl import build_model, build_processor


def save_qwen2_5_vl(folder: Path) -> None:
    """The starter's."""
    processor = build_processor(64, 64)
    model = build_model(processor, seed=1)
    # Many ends, as of several released models, so that some of the random answers reach one.
    model.generation_config.eos_token_id = [processor.tokenizer.eos_token_id, *range(40)]
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def save_qwen3_vl(folder: Path, seed: int = 1) -> None:
    from transformers import (
        GenerationConfig,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    of_qwen2_5 = build_processor(64, 64)
    words = of_qwen2_5.tokenizer
    marks = {name: words.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad", "vision_start")}
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(words),
            "hidden_size": 96,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "max_position_embeddings": 1024,
            "pad_token_id": words.pad_token_id,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 4]},
        },
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 8,
            "out_hidden_size": 96,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=marks["image_pad"],
        video_token_id=marks["video_pad"],
        vision_start_token_id=marks["vision_start"],
        vision_end_token_id=words.convert_tokens_to_ids("<|vision_end|>"),
    )
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)  # transformers' initialisation is for large models.
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=[words.eos_token_id, *range(40)], pad_token_id=words.pad_token_id
    )
    model.save_pretrained(folder)
    Qwen3VLProcessor(
        image_processor=of_qwen2_5.image_processor,
        tokenizer=words,
        video_processor=Qwen3VLVideoProcessor(),
        chat_template=of_qwen2_5.chat_template,
    ).save_pretrained(folder)
