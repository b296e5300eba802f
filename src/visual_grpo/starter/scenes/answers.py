"""The token format of the answers that the small model is trained on: a box, one positive and one negative point."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerFast

PIECES = ('<answer>{"bbox":[', '],"points":[[', ']],"negative_points":[[', "]]}</answer>")
_NUMBERS = (4, 2, 2)
"""How many numbers the box, the positive and the negative point have."""
_COMMA = ","
LENGTH = len(PIECES) + 2 * sum(_NUMBERS) - len(_NUMBERS) + 1
"""Number of tokens of an answer: the pieces, the numbers with commas in between, and the end token."""


def layout() -> list[int | None]:
    """For each of the LENGTH positions the index of a number, or None for a fixed token."""
    places: list[int | None] = []
    number = 0
    for count in _NUMBERS:
        places.append(None)
        for _ in range(count):
            places += [number, None]
            number += 1
        places.pop()  # no comma after the last number
    return [*places, None, None]


def frame(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """[LENGTH] token ids of an answer in which every number is 0."""
    pieces = iter(PIECES)
    texts: list[str] = []
    for count in _NUMBERS:
        texts += [next(pieces), *[part for _ in range(count) for part in ("0", _COMMA)][:-1]]
    ids: list[int] = tokenizer.convert_tokens_to_ids([*texts, next(pieces)])
    return [*ids, tokenizer.eos_token_id]


def number_ids(tokenizer: PreTrainedTokenizerFast, count: int) -> list[int]:
    """The token id of each integer below ``count``."""
    ids: list[int] = tokenizer.convert_tokens_to_ids(list(map(str, range(count))))
    return ids


def places_of(numbers: Sequence[int]) -> list[int]:
    """The positions of the given numbers in an answer: 0-3 are the box, 4-5 the positive, 6-7 the negative point."""
    return [layout().index(number) for number in numbers]


def tokens(frame_ids: Tensor, numbers: Tensor, ids_of_number: Tensor) -> Tensor:
    """[b, LENGTH] token ids of answers with ``numbers`` [b, 8] int64."""
    answers = frame_ids.repeat(len(numbers), 1)
    answers[:, places_of(range(numbers.shape[1]))] = ids_of_number[numbers]
    return answers
