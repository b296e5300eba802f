"""A StableDiffusion3Pipeline of the real classes, small and with random weights."""

from __future__ import annotations

from typing import Any

import torch

SIZE = (64, 96)


def pipeline(*, t5: bool = True) -> Any:
    """As SD3.5-medium is made: dual attention in the first block, RMS norm of queries and keys, 16 latent channels."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=64,
        caption_projection_dim=32,
        pooled_projection_dim=48,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    parts = {
        "transformer": transformer,
        "vae": vae(),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
        "text_encoder": clip(1, 32),
        "text_encoder_2": clip(2, 16),
        "text_encoder_3": t5_encoder() if t5 else None,
    }
    tokenizers = {
        "tokenizer": clip_tokenizer(),
        "tokenizer_2": clip_tokenizer(),
        "tokenizer_3": t5_tokenizer() if t5 else None,
    }
    return frozen(StableDiffusion3Pipeline(**parts, **tokenizers))


def frozen(pipeline: Any) -> Any:
    """In evaluation mode, as a family loads it."""
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval().requires_grad_(False)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def vae() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(4, 4, 4, 4),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=1,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.5305,
        shift_factor=0.0609,
    )


def clip(seed: int, width: int) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    torch.manual_seed(seed)
    vocabulary = len(clip_tokenizer())
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=37,
            num_hidden_layers=3,
            num_attention_heads=4,
            projection_dim=width,
            bos_token_id=vocabulary - 2,
            eos_token_id=vocabulary - 1,
            pad_token_id=vocabulary - 1,
        )
    )


def clip_tokenizer() -> Any:
    """One token a byte."""
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[], model_max_length=77)


def t5_encoder() -> Any:
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(3)
    return T5EncoderModel(T5Config(vocab_size=384, d_model=64, d_kv=16, d_ff=48, num_layers=2, num_heads=4))


def t5_tokenizer() -> Any:
    """T5's own needs a trained vocabulary; this one reads bytes."""
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()
