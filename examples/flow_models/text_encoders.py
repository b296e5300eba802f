"""Tokenizer and text encoders of the small flow models: never trained, random weights that keep words apart.

Trained with the transformer, they memorise prompts, and unseen combinations come out wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
    T5EncoderModel,
)

from visual_grpo.starter.shapes.render import COMBINATIONS

PROMPT_TOKENS = 12
"""Prompts about shapes are padded or cut to this length; a drawn one has nine tokens with begin and end."""
PROMPTS = [combination.prompt for combination in COMBINATIONS]
_BEGIN, _END, _PAD = "<|startoftext|>", "<|endoftext|>", "<|pad|>"
_VOCABULARY = 512


def build_tokenizer(texts: Sequence[str] = PROMPTS, longest: int = PROMPT_TOKENS) -> PreTrainedTokenizerFast:
    """A byte-level BPE with CLIP's begin and end of text, which encodes any text; words of ``texts`` are one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[_BEGIN, _END, _PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_BEGIN} $A {_END}", special_tokens=[(token, tokenizer.token_to_id(token)) for token in (_BEGIN, _END)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_BEGIN,
        eos_token=_END,
        pad_token=_PAD,
        model_max_length=longest,
        model_input_names=["input_ids", "attention_mask"],
    )


CLIP_WIDTH, T5_WIDTH, QWEN3_WIDTH = 32, 64, 64
Clip = TypeVar("Clip", CLIPTextModel, CLIPTextModelWithProjection)


def build_clip(kind: type[Clip], tokenizer: PreTrainedTokenizerFast, seed: int) -> Clip:
    """CLIP's own initial weights (std 0.02) are too small: SD3 reads the last layer but one, unscaled by a norm."""
    torch.manual_seed(seed)
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=CLIP_WIDTH,
        intermediate_size=2 * CLIP_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=CLIP_WIDTH,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    clip = kind(config).eval().requires_grad_(False)
    for name, weight in clip.named_parameters():
        if "token_embedding" in name:
            weight.normal_()
        elif "position_embedding" in name:
            weight.normal_(std=0.3)
        elif weight.ndim == 2:
            weight.normal_(std=weight.shape[1] ** -0.5)
    return clip


def build_t5(vocabulary: int, seed: int, kind: Any = T5EncoderModel) -> Any:
    torch.manual_seed(seed)
    config = kind.config_class(
        vocab_size=vocabulary,
        d_model=T5_WIDTH,
        d_kv=16,
        d_ff=2 * T5_WIDTH,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
    )
    return kind(config).eval().requires_grad_(False)


def build_qwen3(tokenizer: PreTrainedTokenizerFast, seed: int, kind: Any = Qwen3Model, layers: int = 2) -> Any:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=QWEN3_WIDTH,
        intermediate_size=2 * QWEN3_WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=PROMPT_TOKENS,
        pad_token_id=tokenizer.pad_token_id,
    )
    encoder = kind(config).eval().requires_grad_(False)
    for name, weight in encoder.named_parameters():
        if weight.ndim == 2:
            weight.normal_(std=1.0 if "embed_tokens" in name else weight.shape[1] ** -0.5)
    return encoder
