"""The answer that the small model is taught: a box, one positive and one negative point, a token for each piece."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerFast

PIECES = ('<answer>{"bbox":[', '],"points":[[', ']],"negative_points":[[', "]]}</answer>")
_NUMBERS = (4, 2, 2)
"""Of the box, of the positive and of the negative point."""
_COMMA = ","
LENGTH = len(PIECES) + 2 * sum(_NUMBERS) - len(_NUMBERS) + 1
"""Tokens of an answer: the pieces, the numbers with commas between, and the end."""


def layout() -> list[int | None]:
    """What stands at each of LENGTH places: the index of a number, or None for a fixed token."""
    places: list[int | None] = []
    number = 0
    for count in _NUMBERS:
        places.append(None)
        for _ in range(count):
            places += [number, None]
            number += 1
        places.pop()  # no comma after the last
    return [*places, None, None]


def frame(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """[LENGTH] token ids of an answer, with 0 where a number stands."""
    pieces = iter(PIECES)
    texts: list[str] = []
    for count in _NUMBERS:
        texts += [next(pieces), *[part for _ in range(count) for part in ("0", _COMMA)][:-1]]
    ids: list[int] = tokenizer.convert_tokens_to_ids([*texts, next(pieces)])
    return [*ids, tokenizer.eos_token_id]


def number_ids(tokenizer: PreTrainedTokenizerFast, count: int) -> list[int]:
    """The token of each whole number below ``count``."""
    ids: list[int] = tokenizer.convert_tokens_to_ids(list(map(str, range(count))))
    return ids


def places_of(numbers: Sequence[int]) -> list[int]:
    """The places of some numbers: 0-3 the box, 4-5 the positive, 6-7 the negative point."""
    return [layout().index(number) for number in numbers]


def tokens(frame_ids: Tensor, numbers: Tensor, ids_of_number: Tensor) -> Tensor:
    """[b, LENGTH] token ids of answers with ``numbers`` [b, 8] int64."""
    answers = frame_ids.repeat(len(numbers), 1)
    answers[:, places_of(range(numbers.shape[1]))] = ids_of_number[numbers]
    return answers
