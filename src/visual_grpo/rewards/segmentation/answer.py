"""Parses and renders a language policy's answer: a box, positive and negative points, as JSON in ``<answer>`` tags.

``<answer>{"bbox":[x1,y1,x2,y2],"points":[[x,y],...],"negative_points":[[x,y],...]}</answer>``, optionally after
reasoning (Seg-Zero's format, arXiv 2503.06520, with negative points). Coordinates are absolute pixels of the image at
the size that the model received (``TextSample.frame``). As in data preparation, corners of the box may lie at its width
or height, one past the last pixel; they are clamped to that pixel.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from visual_grpo.common.geometry import Box, Point
from visual_grpo.common.images import to_pil, to_tensor
from visual_grpo.common.types import TextSample
from visual_grpo.rewards.segmentation import PointPrompt

KEYS = ("bbox", "points", "negative_points")
Fault = Literal["truncated", "no_answer", "not_json", "wrong_keys", "wrong_numbers", "outside"]
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_THOUGHT = re.compile(r"\s*<think>.+?</think>\s*", re.DOTALL)


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
    """True if exactly ``<think>...</think>`` precedes the answer."""

    @property
    def prompt(self) -> PointPrompt:
        return PointPrompt(positives=self.points, negatives=self.negatives, box=self.box)


def parse_answer(sample: TextSample, size: tuple[int, int]) -> Answer:
    """Parses an answer and rescales it from ``sample.frame`` to an image of ``size`` = (height, width) in pixels.

    Raises AnswerError.
    """
    if not sample.finished:
        raise AnswerError("truncated", f"cut off after {len(sample.text)} characters")
    matches = _ANSWER.findall(sample.text)
    if len(matches) != 1:
        raise AnswerError("no_answer", f"{len(matches)} <answer>...</answer>, expected one")
    content = _parse_json(matches[0])
    (box,) = _rows([content["bbox"]], 4, "bbox")
    points = _rows(content["points"], 2, "points")
    negatives = _rows(content["negative_points"], 2, "negative_points")
    if not points or box[0] > box[2] or box[1] > box[3]:
        raise AnswerError("wrong_numbers", f"needs a point, and x1 <= x2, y1 <= y2 in bbox {box}")
    height, width = sample.frame
    corners = [
        (min(x, width - 1), min(y, height - 1)) if x <= width and y <= height else (x, y) for x, y in (box[:2], box[2:])
    ]
    for x, y in [*corners, *points, *negatives]:
        if not (0 <= x < width and 0 <= y < height):
            raise AnswerError("outside", f"({x}, {y}) is outside the image of {width} x {height} pixels")
    scale = (size[1] / width, size[0] / height)
    (x1, y1), (x2, y2) = (_rescaled(corner, scale) for corner in corners)
    return Answer(
        box=(x1, y1, x2, y2),
        points=tuple(_rescaled(point, scale) for point in points),
        negatives=tuple(_rescaled(point, scale) for point in negatives),
        thought=_THOUGHT.fullmatch(sample.text[: sample.text.index("<answer>")]) is not None,
    )


def _parse_json(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AnswerError("not_json", str(error)) from error
    if not isinstance(content, dict) or set(content) != set(KEYS):
        keys = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise AnswerError("wrong_keys", f"expected an object with {', '.join(KEYS)}, got {keys}")
    return content


def _rows(value: Any, length: int, key: str) -> list[tuple[float, ...]]:
    """Checks that ``value`` is a list of rows of ``length`` numbers each."""
    if not isinstance(value, list) or not all(_is_row(row, length) for row in value):
        raise AnswerError("wrong_numbers", f"{key} must be {length} numbers each, got {value!r:.80}")
    return [tuple(map(float, row)) for row in value]


def _is_row(row: Any, length: int) -> bool:
    # An int may be too large for a float; no image is that large. NaN is not below it.
    return (
        isinstance(row, list)
        and len(row) == length
        and all(type(value) in (int, float) and abs(value) < 2**31 for value in row)
    )


def _rescaled(point: tuple[float, ...], scale: tuple[float, float]) -> Point:
    """Maps a point between two resolutions of the same image; pixel centres have integer coordinates in both."""
    return ((point[0] + 0.5) * scale[0] - 0.5, (point[1] + 0.5) * scale[1] - 0.5)


_SIDE = 192
"""Approximate pixels of a panel's longer side; images are enlarged by a whole factor, never shrunk."""
_TRUTH_COLOUR, _POSITIVE_COLOUR = (255, 255, 255), (60, 220, 90)
_NEGATIVE_COLOUR, _BOX_COLOUR = (255, 70, 70), (250, 200, 60)
_TINT = (70, 150, 255)
_OPACITY = 0.6
_GAP = 4


def draw_answer(image: Tensor, truth: Tensor, answer: Answer | None, fault: str | None, masks: Tensor) -> Tensor:
    """uint8 [3, h, w]: an image, uint8 [3, H, W], in three panels, one below the other.

    They show the outline of the truth (bool [H, W], white) and the masks (bool [2, H, W]) without and with the
    negatives, each with the box (yellow), positive (green) and negative points (red crosses). The fault of an answer
    that cannot be parsed is written into the first panel instead.
    """
    scale = max(1, round(_SIDE / max(truth.shape)))
    outline = (torch.nn.functional.max_pool2d(truth[None].float(), 3, 1, 1)[0] > 0) & ~truth
    panels = [_painted(image, outline, scale, _TRUTH_COLOUR), *(_painted(image, mask, scale, _TINT) for mask in masks)]
    if answer is None:
        text = f"no answer: {(fault or '').replace('_', ' ')}"
        ImageDraw.Draw(panels[0]).text((4, 4), text, fill=_NEGATIVE_COLOUR)
    else:
        for panel in panels:
            _draw_points(panel, answer, scale)
    canvas = Image.new("RGB", (panels[0].width, sum(p.height for p in panels) + _GAP * (len(panels) - 1)), "white")
    for number, panel in enumerate(panels):
        canvas.paste(panel, (0, number * (panel.height + _GAP)))
    return to_tensor(canvas)


def _painted(image: Tensor, mask: Tensor, scale: int, colour: tuple[int, int, int]) -> Image.Image:
    """The image, enlarged, with the mask in a colour."""
    picture = to_pil(image)
    picture = picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
    alpha = (mask.float() * _OPACITY * 255).round().to(torch.uint8)
    stencil = Image.fromarray(alpha.numpy()).resize(picture.size, Image.Resampling.NEAREST)
    picture.paste(Image.new("RGB", picture.size, colour), (0, 0), stencil)
    return picture


def _draw_points(picture: Image.Image, answer: Answer, scale: int) -> None:
    brush, radius = ImageDraw.Draw(picture), max(3, _SIDE // 40)

    def middle(*values: float) -> tuple[float, ...]:
        return tuple((value + 0.5) * scale for value in values)

    brush.rectangle(middle(*answer.box), outline=_BOX_COLOUR)
    for x, y in (middle(*point) for point in answer.points):
        brush.ellipse((x - radius, y - radius, x + radius, y + radius), fill=_POSITIVE_COLOUR, outline="black")
    for x, y in (middle(*point) for point in answer.negatives):
        for sign in (1, -1):
            brush.line((x - radius, y - sign * radius, x + radius, y + sign * radius), fill=_NEGATIVE_COLOUR, width=3)
