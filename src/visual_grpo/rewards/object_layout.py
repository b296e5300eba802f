"""Are the named objects there, as many as asked for, in their colours and places? A detector of the user's tells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.rewards.asked_objects import Asked, asked_objects
from visual_grpo.rewards.named_colours import colour_of
from visual_grpo.rewards.reward import load_function
from visual_grpo.types import PromptRecord

Box = tuple[float, float, float, float]
"""Top, left, bottom, right as shares of height and width."""


@dataclass(frozen=True)
class Found:
    """An object that the detector saw."""

    label: str
    box: Box


class ObjectLayout:
    """Share of the record's conditions that hold, 0 to 1, like GenEval (Ghosh et al. 2023, arXiv 2310.11513).

    Conditions are the record's metadata ``objects``: a list of ``{"label": "dog", "count": 2, "color": "brown",
    "position": "left"}``. Each of ``label``, ``color`` and ``position`` is one condition: there are ``count`` of them
    (without it, at least one), and so many (or one) have that colour, and that place. The colour is the name nearest to
    the median of the middle of the box, the place is that of the box's centre in thirds of the image. A record without
    objects is unscored.

    Args:
        detector: ``package.module:function``; called with a uint8 image [3, height, width], it returns a list of
            (label, (top, left, bottom, right) in shares from 0 to 1, score from 0 to 1).
        threshold: the least score of an object that counts.
    """

    def __init__(self, detector: str, threshold: float = 0.5) -> None:
        if not 0 <= threshold <= 1:
            raise UserError(f"object_layout: threshold must be from 0 to 1, got {threshold}")
        self.detector: Callable[[Tensor], Any] = load_function(detector)
        self.threshold = threshold

    def check_records(self, records: Sequence[PromptRecord]) -> None:
        """Raises UserError if objects are malformed, or no record has any."""
        asked = [asked_objects(record) for record in records]
        if records and not any(asked):
            raise UserError(
                f"the reward object_layout looks for named objects, and none of {len(records)} records has any; the"
                f" first is {records[0].id!r}. Add metadata objects, such as"
                ' [{"label": "dog", "count": 2, "color": "brown", "position": "left"}], or remove the reward'
            )

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        values = torch.full((len(samples),), torch.nan)
        for row, (record, sample) in enumerate(zip(prompts, samples, strict=True)):
            if asked := asked_objects(record):
                found = self._found(sample.cpu())
                held = [holds for each in asked for holds in _conditions(each, found, sample.cpu())]
                values[row] = sum(held) / len(held)
        return values

    def _found(self, image: Tensor) -> list[Found]:
        returned = self.detector(image.clone())
        if not isinstance(returned, Iterable):
            raise _no_detection(returned)
        return [Found(label, box) for label, box, score in map(_checked, returned) if score >= self.threshold]


def _conditions(asked: Asked, found: Sequence[Found], image: Tensor) -> Iterator[bool]:
    own = [each for each in found if each.label.casefold() == asked.label.casefold()]
    wanted = asked.count or 1
    yield len(own) == asked.count if asked.count else bool(own)
    if asked.color:
        yield sum(colour_of(_middle(image, each.box)) == asked.color for each in own) >= wanted
    if asked.position:
        yield sum(asked.position in _places(each.box) for each in own) >= wanted


def _middle(image: Tensor, box: Box) -> Tensor:
    """[3, h, w]: the middle half of the box in both directions, at least a pixel, where the background hardly is."""
    height, width = image.shape[-2:]
    top, left, bottom, right = box
    down, along = (bottom - top) / 4, (right - left) / 4
    first, start = int((top + down) * height), int((left + along) * width)
    last, end = max(first + 1, int((bottom - down) * height)), max(start + 1, int((right - along) * width))
    return image[:, first:last, start:end]


def _places(box: Box) -> set[str]:
    """The names of the thirds that hold the box's centre."""
    down, along = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    rows, columns = ("top", "middle", "bottom"), ("left", "middle", "right")
    row, column = rows[min(int(3 * down), 2)], columns[min(int(3 * along), 2)]
    return {"center"} if row == column == "middle" else {row, column} - {"middle"}


def _checked(each: Any) -> tuple[str, Box, float]:
    try:
        label, box, score = each
        top, left, bottom, right = (float(edge) for edge in box)
        score = float(score)
    except (TypeError, ValueError) as error:
        raise _no_detection(each) from error
    if not isinstance(label, str) or not (0 <= top < bottom <= 1 and 0 <= left < right <= 1 and 0 <= score <= 1):
        raise _no_detection(each)
    return label, (top, left, bottom, right), score


def _no_detection(got: Any) -> UserError:
    return UserError(
        "object_layout: the detector must return a list of (label, (top, left, bottom, right), score) with numbers from"
        f" 0 to 1, got {got!r}"
    )
