"""A tokenizer that stands in for a released one.

A word, a digit, a punctuation mark or a line's end is a token, which is about what a byte pair encoding makes of
English. Which id it has does not matter, except of the special tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
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
        special: tokens with their ids; the first that is left is any other word's.
        longest: tokens that the model reads at most (``model_max_length``).
        named: special tokens that a processor asks the tokenizer for by name.
    """
    unused = next(number for number in range(len(special) + 1) if number not in special.values())
    tokenizer = Tokenizer(models.WordLevel({WORD: unused, **special}, unk_token=WORD))
    parts = pre_tokenizers.Split(Regex(r"\n|\d|[^\W\d]+|[^\w\s]"), behavior="removed", invert=True)
    tokenizer.pre_tokenizer = parts
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
