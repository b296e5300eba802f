"""A tokenizer that stands in for a released one: a word or a punctuation mark is a token, which is about what a byte
pair encoding makes of English. Which id it has does not matter, except of the special tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORD = "<word>"


def word_tokenizer(
    special: Mapping[str, int],
    *,
    pad: str,
    eos: str,
    bos: str | None = None,
    longest: int | None = None,
    named: Mapping[str, str] | None = None,
    padding_side: str = "right",
) -> PreTrainedTokenizerFast:
    """
    Args:
        special: tokens with their ids; 0 is any other word's.
        longest: tokens that the model reads at most (``model_max_length``).
        named: special tokens that a processor asks the tokenizer for by name.
    """
    tokenizer = Tokenizer(models.WordLevel({WORD: 0, **special}, unk_token=WORD))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits()])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=WORD,
        pad_token=pad,
        eos_token=eos,
        bos_token=bos or eos,
        padding_side=padding_side,
        model_input_names=["input_ids", "attention_mask"],
        **({} if longest is None else {"model_max_length": longest}),
        **({} if named is None else {"extra_special_tokens": dict(named)}),
    )


def prompt_of(words: int, number: int) -> str:
    """A prompt of about ``words`` tokens; prompts of different numbers have different lengths, as real ones do."""
    sizes: Sequence[str] = ("red", "round", "small", "bright", "distant")
    count = max(words - number % 5, 1)
    return " ".join(sizes[(place + number) % len(sizes)] for place in range(count))
