"""Tokenizer of the small Stable Diffusion 3: every word of the drawn prompts is one token."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from visual_grpo.starter.shapes.world import COMBINATIONS

PROMPT_TOKENS = 12
"""Prompts are padded or cut to so many; a drawn one has nine with begin and end."""
_BEGIN, _END, _PAD = "<|startoftext|>", "<|endoftext|>", "<|pad|>"
_VOCABULARY = 512


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Deterministic. A byte-level BPE with CLIP's begin and end of text: it still encodes any text."""
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
    tokenizer.train_from_iterator([combination.prompt for combination in COMBINATIONS], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_BEGIN} $A {_END}",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (_BEGIN, _END)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_BEGIN,
        eos_token=_END,
        pad_token=_PAD,
        model_max_length=PROMPT_TOKENS,
        model_input_names=["input_ids", "attention_mask"],
    )
