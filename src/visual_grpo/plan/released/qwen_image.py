"""Qwen-Image (Qwen/Qwen-Image): the sizes that diffusers 0.42's classes have as they stand, which are the released
ones; its text encoder is the Qwen2.5-VL of 7 billion parameters."""

from __future__ import annotations

from typing import Any

import torch

from visual_grpo.plan.released import qwen2_5_vl
from visual_grpo.plan.released.weightless import frozen


def build(path: str, dtype: torch.dtype) -> Any:
    """A ``QwenImagePipeline``, as ``policies.qwen_image.family.load`` gives it."""
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    pipeline = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            time_shift_type="exponential",
            base_shift=0.5,
            max_shift=0.9,
            base_image_seq_len=256,
            max_image_seq_len=8192,
            shift_terminal=0.02,
        ),
        vae=frozen(AutoencoderKLQwenImage, dtype),
        text_encoder=qwen2_5_vl.network("7B", dtype),
        tokenizer=qwen2_5_vl.tokenizer(),
        transformer=frozen(QwenImageTransformer2DModel, dtype),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
