"""The GLM-Image family: what it is called, what it can do, and how it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from visual_grpo.config import ModelConfig
from visual_grpo.policies.family import Family
from visual_grpo.policies.glm_image.model import MODULES, GlmImage
from visual_grpo.policies.loading import load_pipeline

if TYPE_CHECKING:
    from diffusers import GlmImagePipeline

_PARTS = ("tokenizer", "processor", "text_encoder", "vision_language_encoder", "vae", "transformer", "scheduler")


def load(path: str, config: ModelConfig) -> GlmImagePipeline:
    """A folder or hub id, frozen; with the preview size that a small model's folder says."""
    import torch

    from visual_grpo.policies.glm_image.processor import PreviewProcessor, preview_side

    def prepare(pipeline: GlmImagePipeline) -> None:
        pipeline.vae.to(memory_format=torch.channels_last)  # 3x faster convolutions on a CPU.

    pipeline = load_pipeline("GlmImagePipeline", path, config, _PARTS, prepare=prepare)
    pipeline.processor = PreviewProcessor.of(pipeline.processor, preview_side(path))
    return pipeline


FAMILY = Family(
    name="glm_image",
    modules=MODULES,
    tasks=("t2i", "i2i", "mixed"),
    saved_as=("GlmImagePipeline",),
    load=load,
    build=GlmImage,
)
