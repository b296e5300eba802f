"""Soft-TIFA (GenEval 2, arXiv 2512.16853): the probability of the expected answer to each question about a prompt.

The arithmetic mean over the questions estimates how much of the prompt is there, the geometric mean whether all of it
is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
SUFFIX = " Answer in one word."
FLOOR = 1e-10
"""Below it a probability is that: else one question that is lost for certain would make all others worthless."""


def spellings(answer: str) -> list[str]:
    """First tokens that count as the answer: small and capital, with a space before or not, and numbers as digits."""
    words = [answer.lower(), answer.lower().capitalize()]
    if answer.lower() in NUMBERS:
        words.append(str(NUMBERS.index(answer.lower())))
    return [space + word for word in words for space in ("", " ")]


def arithmetic_mean(probabilities: Sequence[float]) -> float:
    return math.fsum(probabilities) / len(probabilities)


def geometric_mean(probabilities: Sequence[float]) -> float:
    """exp(mean(log p)), of at least one probability; each at least `FLOOR`."""
    return math.exp(math.fsum(math.log(max(p, FLOOR)) for p in probabilities) / len(probabilities))


def questions_of(metadata: Mapping[str, object]) -> list[tuple[str, str]]:
    """(question, expected answer) of a record: its ``vqa_list``, as in GenEval 2's data; empty if it has none.

    Raises:
        ValueError: another form.
    """
    listed = metadata.get("vqa_list") or []
    if not isinstance(listed, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) and text for text in pair)
        for pair in listed
    ):
        raise ValueError(f"metadata vqa_list must be a list of [question, answer], got {str(listed)[:200]}")
    return [(question, answer) for question, answer in listed]
