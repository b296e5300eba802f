"""The starter's small models before they are pretrained: a plan needs their sizes only."""

from __future__ import annotations

from typing import Any

import torch

from visual_grpo.config import Parameters
from visual_grpo.errors import UserError


def build_small(family: str, config: Parameters) -> Any:
    """What ``family``'s ``load`` would give, without values. Raises UserError for one that only the starter makes."""
    height, width = config.data.height, config.data.width
    if config.starter.world == "words" or family not in ("glm_image", "sd3", "qwen2_5_vl"):
        raise UserError(
            f"The model {config.starter.model} is not there, and a plan needs its configuration files. Run the pipeline"
            " starter first, or name a released model with model.path."
        )
    if family == "qwen2_5_vl":
        from visual_grpo.starter.qwen2_5_vl.model import build_model, build_processor

        processor = build_processor(height, width)
        return _without_values(build_model(processor, 0)), processor
    pipeline = _sd3(height, width) if family == "sd3" else _glm_image(config, height, width)
    pipeline.set_progress_bar_config(disable=True)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            _without_values(part)
    return pipeline


def _sd3(height: int, width: int) -> Any:
    from visual_grpo.starter.glm_image.modules import build_vae
    from visual_grpo.starter.sd3.modules import build_pipeline

    return build_pipeline(build_vae(height, width, 0), height, width, 0)


def _glm_image(config: Parameters, height: int, width: int) -> Any:
    from diffusers import GlmImagePipeline
    from transformers import ByT5Tokenizer

    from visual_grpo.policies.glm_image.processor import PreviewProcessor
    from visual_grpo.starter.glm_image import modules
    from visual_grpo.starter.glm_image.codebook import CODEBOOK_SIZE, FEATURES
    from visual_grpo.starter.glm_image.corpus import PREVIEW_SIDE
    from visual_grpo.starter.glm_image.tokenizer import build_processor

    processor, codebook = build_processor(config.data.task), torch.rand(CODEBOOK_SIZE, FEATURES)
    pipeline = GlmImagePipeline(
        tokenizer=ByT5Tokenizer(),
        processor=processor,
        text_encoder=modules.build_glyph_encoder(0),
        vision_language_encoder=modules.build_ar(processor, codebook, 0),
        vae=modules.build_vae(height, width, 0),
        transformer=modules.build_dit(codebook, 0),
        scheduler=modules.build_scheduler(),
    )
    pipeline.processor = PreviewProcessor.of(processor, PREVIEW_SIDE)
    return pipeline


def _without_values(network: torch.nn.Module) -> Any:
    return network.eval().requires_grad_(False).to("meta")
