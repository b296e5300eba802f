"""Parses a language policy's answer: a box, positive and negative points, as JSON between ``<answer>`` tags.

``<answer>{"bbox":[x1,y1,x2,y2],"points":[[x,y],...],"negative_points":[[x,y],...]}</answer>``, optionally after
reasoning (Seg-Zero's format, arXiv 2503.06520, with negative points). Coordinates are absolute pixels of the image at
the size that the model received (``TextSample.frame``).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from visual_grpo.common.geometry import Box, Point
from visual_grpo.common.types import TextSample
from visual_grpo.rewards.segmentation.segmenter import PointPrompt

KEYS = ("bbox", "points", "negative_points")
Fault = Literal["truncated", "no_answer", "not_json", "wrong_keys", "wrong_numbers", "outside"]
FAULTS: tuple[Fault, ...] = get_args(Fault)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_THOUGHT = re.compile(r"\s*<think>.+?</think>\s*", re.DOTALL)
_POINT, _BOX = 2, 4


class AnswerError(ValueError):
    """An answer that cannot be parsed; ``fault`` is the category, the message gives the details."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A parsed answer, in pixels of the image at the requested size."""

    box: Box
    points: tuple[Point, ...]
    """At least one."""
    negatives: tuple[Point, ...]
    thought: bool
    """Whether exactly ``<think>...</think>`` precedes the answer."""

    @property
    def prompt(self) -> PointPrompt:
        return PointPrompt(positives=self.points, negatives=self.negatives, box=self.box)


def parse_answer(sample: TextSample, size: tuple[int, int]) -> Answer:
    """Parses an answer and rescales it from ``sample.frame`` to an image of ``size`` = (height, width) in pixels.

    Raises:
        AnswerError: truncated, not in the format, or with coordinates outside the image.
    """
    if not sample.finished:
        raise AnswerError("truncated", f"cut off after {len(sample.text)} characters")
    found = _ANSWER.findall(sample.text)
    if len(found) != 1:
        raise AnswerError("no_answer", f"{len(found)} <answer>...</answer>, expected one")
    content = _object(found[0])
    (box,) = _rows([content["bbox"]], _BOX, "bbox")
    points = _rows(content["points"], _POINT, "points")
    negatives = _rows(content["negative_points"], _POINT, "negative_points")
    if not points or box[0] > box[2] or box[1] > box[3]:
        raise AnswerError("wrong_numbers", f"needs a point, and x1 <= x2, y1 <= y2 in bbox {box}")
    height, width = sample.frame
    for x, y in [box[:2], box[2:], *points, *negatives]:
        if not (0 <= x < width and 0 <= y < height):
            raise AnswerError("outside", f"({x}, {y}) is outside the image of {width} x {height} pixels")
    scale = (size[1] / width, size[0] / height)
    (x1, y1), (x2, y2) = (_rescaled(corner, scale) for corner in (box[:2], box[2:]))
    return Answer(
        box=(x1, y1, x2, y2),
        points=tuple(_rescaled(point, scale) for point in points),
        negatives=tuple(_rescaled(point, scale) for point in negatives),
        thought=_THOUGHT.fullmatch(sample.text[: sample.text.index("<answer>")]) is not None,
    )


def _object(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AnswerError("not_json", str(error)) from error
    if not isinstance(content, dict) or set(content) != set(KEYS):
        found = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise AnswerError("wrong_keys", f"expected an object with {', '.join(KEYS)}, got {found}")
    return content


def _rows(value: Any, length: int, key: str) -> list[tuple[float, ...]]:
    """Checks that ``value`` is a list of rows of ``length`` numbers each."""
    if not isinstance(value, list) or not all(_is_row(row, length) for row in value):
        raise AnswerError("wrong_numbers", f"{key} must be {length} numbers each, got {value!r:.80}")
    return [tuple(map(float, row)) for row in value]


def _is_row(row: Any, length: int) -> bool:
    # An int may be too large for a float; no image is that large. NaN is no less than it.
    return (
        isinstance(row, list)
        and len(row) == length
        and all(type(value) in (int, float) and abs(value) < 2**31 for value in row)
    )


def _rescaled(point: tuple[float, ...], scale: tuple[float, float]) -> Point:
    """Maps a point between two resolutions of the same image; pixel centres have integer coordinates in both."""
    return ((point[0] + 0.5) * scale[0] - 0.5, (point[1] + 0.5) * scale[1] - 0.5)
