"""What a worker says of a batch: scores that can be used, and why the others cannot."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from visual_grpo.rewards.remote.faults import Lost, RequestError

_PART = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MOST_PARTS = 64
_LARGEST = 3.4e38
"""Rewards are float32."""


@dataclass(frozen=True)
class Scored:
    """The judgement of one sample."""

    value: float
    """NaN = the worker cannot judge it."""
    parts: Mapping[str, float] = field(default_factory=dict)


def scored(scores: Any, parts: Any, count: int) -> list[Scored | Lost]:
    """One judgement for each of ``count`` samples.

    Args:
        scores: a list of numbers and nulls; null = unscored. Of another number or none at all that sample is lost.
        parts: name -> such a list, or None; what is no number there is NaN.

    Raises:
        RequestError: not one score a sample.
    """
    check_length("scores", scores, count)
    columns = _columns(parts, count)
    return [judged(score, {name: column[row] for name, column in columns.items()}) for row, score in enumerate(scores)]


def judged(score: Any, parts: Mapping[str, Any]) -> Scored | Lost:
    """One sample's judgement: null is unscored, anything but a finite number is lost."""
    value = math.nan if score is None else _number(score)
    if score is not None and math.isnan(value):
        return Lost(f"its score is {_short(score)}, not a finite number or null")
    return Scored(value, {name: _number(part) for name, part in parts.items()})


def _columns(parts: Any, count: int) -> dict[str, Sequence[Any]]:
    if parts is None:
        return {}
    if not isinstance(parts, dict) or len(parts) > _MOST_PARTS or not all(map(_PART.fullmatch, parts)):
        raise RequestError(
            f"its parts must be an object of at most {_MOST_PARTS} lists with names of letters, digits and _.-,"
            f" got {_short(parts)}",
            by_sample=True,
        )
    for name, column in parts.items():
        check_length(f"parts.{name}", column, count)
    return parts


def check_length(what: str, values: Any, count: int) -> None:
    """Raises RequestError unless ``values`` is a list of so many."""
    if not isinstance(values, list):
        raise RequestError(f"its {what} must be a list, got {_short(values)}", by_sample=True)
    if len(values) != count:
        raise RequestError(f"its {what} are {len(values)} for {count} images", by_sample=True)


def _number(value: Any) -> float:
    """NaN for what is no finite number of float32; ``true`` is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST < value < _LARGEST:
        return math.nan
    return float(value)


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a very large number"
    return text if len(text) <= 60 else f"{text[:60]}..."
