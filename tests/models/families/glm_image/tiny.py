"""A GlmImagePipeline of the starter's classes with random weights and peaky token logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

SIZE = (64, 96)


def save(folder: Path) -> None:
    pipeline().save_pretrained(folder)
    (folder / "visual_grpo.json").write_text(json.dumps({"preview_side": 2}))


def pipeline() -> Any:
    from diffusers import GlmImagePipeline
    from transformers import ByT5Tokenizer

    from visual_grpo.starter.glm_image import modules
    from visual_grpo.starter.glm_image.codebook import CODEBOOK_SIZE, FEATURES, build_processor

    torch.set_num_threads(1)
    processor = build_processor()
    codebook = torch.rand(CODEBOOK_SIZE, FEATURES, generator=torch.Generator().manual_seed(0))
    ar = modules.build_ar(processor, codebook, seed=1)
    with torch.no_grad():
        ar.lm_head.weight.mul_(4)  # Untrained logits are nearly flat: a wrong scale would go unseen.
    vae = modules.build_vae(*SIZE, seed=4)
    vae.register_to_config(latents_mean=[0.3, -0.2, 0.1, 0.4], latents_std=[1.5, 0.6, 1.2, 0.8])  # Nor 0 and 1.
    dit = modules.build_dit(codebook, seed=2)
    # Two layers of three: a first and a last one, whose cost is that of most tests.
    del ar.model.language_model.layers[2:], dit.transformer_blocks[2:]
    ar.config.text_config.num_hidden_layers = 2
    dit.register_to_config(num_layers=2)
    return GlmImagePipeline(
        tokenizer=ByT5Tokenizer(),
        processor=processor,
        text_encoder=modules.build_glyph_encoder(3),
        vision_language_encoder=ar,
        vae=vae,
        transformer=dit,
        scheduler=modules.build_scheduler(),
    )
