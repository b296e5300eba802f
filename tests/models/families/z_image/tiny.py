"""A ZImagePipeline of the real classes, small and with random weights."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.families.qwen_image import tiny as qwen_image
from tests.models.families.sd3 import tiny as sd3


def pipeline(*, turbo: bool = False) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

    torch.set_num_threads(1)
    words = tokenizer()
    encoder = text_encoder(words, layers=3).model
    torch.manual_seed(0)
    transformer = ZImageTransformer2DModel(
        in_channels=16,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=32,
        axes_dims=[4, 6, 6],
        axes_lens=[1024, 64, 64],
    )
    return sd3.frozen(
        ZImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0 if turbo else 6.0),
            vae=sd3.vae(),
            text_encoder=encoder,
            tokenizer=words,
            transformer=transformer,
        )
    )


def tokenizer() -> Any:
    """One token a byte, and a chat template in which thinking can be switched off, as in Qwen3's."""
    words = qwen_image.tokenizer()
    words.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    )
    return words


def text_encoder(words: Any, *, layers: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(words),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=1024,
            pad_token_id=words.pad_token_id,
        )
    )
