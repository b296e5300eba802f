"""The token format of the answers that the small model is trained on: a box, one positive and one negative point."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedTokenizerFast

PIECES = ('<answer>{"bbox":[', '],"points":[[', ']],"negative_points":[[', "]]}</answer>")
_NUMBERS = (4, 2, 2)
"""How many numbers the box, the positive and the negative point have."""
_ZERO, _COMMA = "0", ","
_INSIDE = [[*[_ZERO, _COMMA] * (count - 1), _ZERO] for count in _NUMBERS]
_FRAME = [*(part for piece, numbers in zip(PIECES, _INSIDE, strict=False) for part in (piece, *numbers)), PIECES[-1]]
"""The texts of an answer's tokens in which every number is 0."""
PLACES = [place for place, text in enumerate(_FRAME) if text == _ZERO]
"""The positions of the numbers in an answer: 0-3 are the box, 4-5 the positive, 6-7 the negative point."""
LENGTH = len(_FRAME) + 1
"""Number of tokens of an answer, with the end token."""


def frame(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """[LENGTH] token ids of an answer in which every number is 0."""
    ids: list[int] = tokenizer.convert_tokens_to_ids(_FRAME)
    return [*ids, tokenizer.eos_token_id]


def number_ids(tokenizer: PreTrainedTokenizerFast, count: int) -> list[int]:
    """The token id of each integer below ``count``."""
    ids: list[int] = tokenizer.convert_tokens_to_ids(list(map(str, range(count))))
    return ids


def tokens(frame_ids: Tensor, numbers: Tensor, ids_of_number: Tensor) -> Tensor:
    """[b, LENGTH] token ids of answers with ``numbers`` [b, 8] int64."""
    answers = frame_ids.repeat(len(numbers), 1)
    answers[:, PLACES] = ids_of_number[numbers]
    return answers
