"""GLM-Image (zai-org/GLM-Image): sizes of its configuration classes in transformers 5.23 and diffusers 0.42.

As they stand they are the released ones, except where the published size of a part says otherwise: the decoder of 7
billion parameters has 32 heads of 128. The VAE's widths are assumed from its latents' shape.
"""

from __future__ import annotations

from typing import Any

import torch

from visual_grpo.plan.released.weightless import frozen
from visual_grpo.plan.released.words import word_tokenizer

_CODEBOOK, _VISION_VOCABULARY = 16384, 16512
_START, _END = 16384, 16385
_PAD, _IMAGE, _GRID_START, _GRID_END = 16512, 167855, 167856, 167857
_TEMPLATE = (
    "{%- for message in messages -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}<|dit_token_16384|><|image|><|dit_token_16385|>"
    "{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}{%- endfor -%}"
)


def build(path: str, dtype: torch.dtype) -> Any:
    """A ``GlmImagePipeline``, as ``policies.glm_image.family.load`` gives it."""
    from diffusers import AutoencoderKL, GlmImagePipeline, GlmImageTransformer2DModel
    from transformers import ByT5Tokenizer, GenerationConfig, GlmImageForConditionalGeneration, T5Config, T5EncoderModel

    from visual_grpo.policies.glm_image.processor import STOCK_SIDE, PreviewProcessor
    from visual_grpo.starter.glm_image.modules import build_scheduler

    encoder = frozen(lambda: GlmImageForConditionalGeneration(_language_config()), dtype)
    encoder.generation_config = GenerationConfig(do_sample=True, temperature=0.9, top_p=0.75, eos_token_id=_END)
    glyphs = T5Config(
        vocab_size=384, d_model=1472, d_kv=64, d_ff=3584, num_layers=12, num_heads=6, feed_forward_proj="gated-gelu"
    )
    processor = _processor()
    pipeline = GlmImagePipeline(
        tokenizer=ByT5Tokenizer(),
        processor=processor,
        text_encoder=frozen(lambda: T5EncoderModel(glyphs), dtype),
        vision_language_encoder=encoder,
        vae=frozen(lambda: AutoencoderKL(**_VAE), dtype),
        transformer=frozen(lambda: GlmImageTransformer2DModel(num_attention_heads=32, attention_head_dim=128), dtype),
        scheduler=build_scheduler(),
    )
    pipeline.processor = PreviewProcessor.of(processor, STOCK_SIDE)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


_VAE: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 512, 1024, 1024),
    "layers_per_block": 3,
    "latent_channels": 16,
    "latents_mean": (0.0,) * 16,
    "latents_std": (1.0,) * 16,
    "mid_block_add_attention": False,
    "sample_size": 1024,
}


def _language_config() -> Any:
    from transformers import GlmImageConfig

    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        # The class's own sections are of half a head: its rotation is partial.
        "partial_rotary_factor": 0.5,
        "mrope_section": [8, 12, 12],
    }
    return GlmImageConfig(
        image_token_id=_IMAGE,
        image_start_token_id=_START,
        image_end_token_id=_END,
        text_config={"rope_parameters": rope, "pad_token_id": _PAD},
    )


def _processor() -> Any:
    from transformers import GlmImageProcessor
    from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil

    tokenizer = word_tokenizer(
        {
            **{f"<|dit_token_{number}|>": number for number in (_START, _END)},
            "<|endoftext|>": _PAD,
            "<|image|>": _IMAGE,
            "<sop>": _GRID_START,
            "<eop>": _GRID_END,
        },
        pad="<|endoftext|>",
        eos=f"<|dit_token_{_END}|>",
        bos=f"<|dit_token_{_START}|>",
        named={"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"},
        padding_side="left",
    )
    return GlmImageProcessor(image_processor=GlmImageImageProcessorPil(), tokenizer=tokenizer, chat_template=_TEMPLATE)
