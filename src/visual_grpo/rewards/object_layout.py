"""Scores named objects, their number, colours and places, found by a detector of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.common.types import PromptRecord
from visual_grpo.rewards.reward import load_function
from visual_grpo.rewards.target import Region, is_box

Detection = tuple[str, Region]
"""Label and box of an object that the detector saw."""
POSITIONS = ("left", "right", "top", "bottom", "center")
_KEYS = ("label", "count", "color", "position")
COLOURS = {
    "black": [(0, 0, 0), (30, 30, 30)],
    "grey": [(80, 80, 80), (128, 128, 128), (190, 190, 190)],
    "white": [(255, 255, 255)],
    "red": [(220, 20, 30), (255, 0, 0), (130, 0, 15)],
    "orange": [(255, 140, 0), (240, 100, 20)],
    "yellow": [(250, 230, 40), (255, 255, 0)],
    "green": [(40, 160, 60), (0, 255, 0), (0, 90, 20), (150, 200, 120)],
    "blue": [(40, 80, 220), (0, 0, 255), (0, 0, 120), (135, 190, 235)],
    "purple": [(130, 40, 160), (75, 0, 110), (190, 150, 215)],
    "pink": [(255, 150, 190), (255, 60, 160)],
    "brown": [(120, 75, 40), (75, 45, 20), (165, 115, 70)],
}
"""Typical colours of each name, light and dark, sRGB."""
_TO_XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
_WHITE = (0.95047, 1.0, 1.08883)
"""sRGB's white, D65."""


class ObjectLayout:
    """Share of the record's conditions that hold, 0 to 1, like GenEval (Ghosh et al. 2023, arXiv 2310.11513).

    Conditions are the record's metadata ``objects``: a list of ``{"label": "dog", "count": 2, "color": "brown",
    "position": "left"}``. Each of ``label``, ``color`` and ``position`` is one condition: there are ``count`` of them
    (without it, at least one), and so many (or one) have that colour, and that place. The colour is the name nearest to
    the median of the middle of the box, the place is where the box's centre lies in thirds of the image. A record
    without objects is unscored.

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
        requested = [requested_objects(record) for record in records]
        if records and not any(requested):
            raise UserError(
                f"the reward object_layout looks for named objects, and none of {len(records)} records has any; the"
                f" first is {records[0].id!r}. Add metadata objects, such as"
                ' [{"label": "dog", "count": 2, "color": "brown", "position": "left"}], or remove the reward'
            )

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        values = torch.full((len(samples),), torch.nan)
        for row, (record, sample) in enumerate(zip(prompts, samples, strict=True)):
            if requested := requested_objects(record):
                detections = self._detect(sample.cpu())
                held = [holds for wanted in requested for holds in _conditions(wanted, detections, sample.cpu())]
                values[row] = sum(held) / len(held)
        return values

    def _detect(self, image: Tensor) -> list[Detection]:
        returned = self.detector(image.clone())
        if not isinstance(returned, Iterable):
            raise _detection_error(returned)
        return [detection for detection, score in map(_parse_detection, returned) if score >= self.threshold]


def _conditions(requested: Mapping[str, Any], detections: Sequence[Detection], image: Tensor) -> Iterator[bool]:
    boxes = [box for label, box in detections if label.casefold() == requested["label"].casefold()]
    count, color, position = (requested.get(key) for key in ("count", "color", "position"))
    yield len(boxes) == count if count else bool(boxes)
    if color:
        yield sum(colour_of(_middle(image, box)) == color for box in boxes) >= (count or 1)
    if position:
        yield sum(position in _places(box) for box in boxes) >= (count or 1)


def _middle(image: Tensor, box: Region) -> Tensor:
    """[3, h, w]: the middle half of the box in both directions, at least a pixel, where the background hardly is."""
    height, width = image.shape[-2:]
    top, left, bottom, right = box
    down, along = (bottom - top) / 4, (right - left) / 4
    first, start = int((top + down) * height), int((left + along) * width)
    last, end = max(first + 1, int((bottom - down) * height)), max(start + 1, int((right - along) * width))
    return image[:, first:last, start:end]


def _places(box: Region) -> set[str]:
    """The names of the thirds that hold the box's centre."""
    down, along = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    rows, columns = ("top", "middle", "bottom"), ("left", "middle", "right")
    row, column = rows[min(int(3 * down), 2)], columns[min(int(3 * along), 2)]
    return {"center"} if row == column == "middle" else {row, column} - {"middle"}


def _parse_detection(entry: Any) -> tuple[Detection, float]:
    try:
        label, (top, left, bottom, right), score = entry
        box = (float(top), float(left), float(bottom), float(right))
        score = float(score)
    except (TypeError, ValueError) as error:
        raise _detection_error(entry) from error
    if not isinstance(label, str) or not is_box(box) or not 0 <= score <= 1:
        raise _detection_error(entry)
    return (label, box), score


def _detection_error(got: Any) -> UserError:
    expected = "a list of (label, (top, left, bottom, right), score) with numbers from 0 to 1"
    return UserError(f"object_layout: the detector must return {expected}, got {got!r}")


def requested_objects(record: PromptRecord) -> Sequence[Mapping[str, Any]]:
    """Empty if the record has none. Raises UserError, naming the record and the entry, where they are malformed."""
    entries = record.metadata.get("objects")
    if entries is None:
        return []
    if not isinstance(entries, list | tuple) or not entries:
        raise _metadata_error(record, f"are {entries!r}; expected a list of objects")
    for entry in entries:
        _check_object(record, entry)
    return entries


def _check_object(record: PromptRecord, entry: Any) -> None:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("label"), str):
        raise _metadata_error(record, f"have {entry!r}; expected an object with a label")
    if unknown := [key for key in entry if key not in _KEYS]:
        hint = nearest_hint(str(unknown[0]), _KEYS)
        raise _metadata_error(record, f"have the key {unknown[0]!r}; an object has {', '.join(_KEYS)}.{hint}")
    count = entry.get("count")
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise _metadata_error(record, f"have the count {count!r}; expected a whole number from 1")
    for key, names in (("color", tuple(COLOURS)), ("position", POSITIONS)):
        if entry.get(key) is not None and entry[key] not in names:
            hint = nearest_hint(str(entry[key]), names)
            raise _metadata_error(record, f"have the {key} {entry[key]!r}; expected one of {', '.join(names)}.{hint}")


def _metadata_error(record: PromptRecord, what: str) -> UserError:
    return UserError(f"record {record.id!r}: its metadata objects {what}")


def colour_of(patch: Tensor) -> str:
    """The name of which a typical colour is nearest in CIELAB to the median of a uint8 patch [3, h, w]."""
    median = _lab(patch.flatten(1).double().median(1).values)
    return min(COLOURS, key=lambda name: min(_distance(median, typical) for typical in COLOURS[name]))


def _distance(lab: Tensor, rgb: tuple[int, int, int]) -> float:
    return float((lab - _lab(torch.tensor(rgb, dtype=torch.float64))).norm())


def _lab(rgb: Tensor) -> Tensor:
    """[3] in CIELAB (CIE 1976), of [3] sRGB in 0..255."""
    share = rgb / 255
    linear = torch.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    xyz = (torch.tensor(_TO_XYZ, dtype=torch.float64) * linear).sum(1) / torch.tensor(_WHITE, dtype=torch.float64)
    cut = 6 / 29
    root = torch.where(xyz > cut**3, xyz ** (1 / 3), xyz / (3 * cut**2) + 4 / 29)
    return torch.stack([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])
