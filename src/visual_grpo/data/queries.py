"""Prepares a query about an image: stretches image and mask to one size and rescales box and points.

Coordinates are in pixels; (0, 0) is the centre of the first pixel.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from visual_grpo.common.geometry import Box, Point, box_of, inner_points
from visual_grpo.common.images import read_mask
from visual_grpo.data.image_store import MASK, STRETCHED, ImageStore, PreparedImage, original_size
from visual_grpo.data.raw import RawRecord, Rejected, prefix_rejections, wrong_type

_POINTS = 2
"""Number of positive points that are derived from the mask if none are given, as in Seg-Zero's records."""
_LARGEST = 1e9
"""No coordinate in pixels is larger; infinity, NaN and integers beyond all floats are none."""

Size = tuple[int, int]
"""(width, height) in pixels."""


def prepare_query(store: ImageStore, record: RawRecord) -> tuple[RawRecord, PreparedImage, PreparedImage]:
    """Stores image and mask, and puts box and points, in pixels of the stored image, into the record's metadata.

    Args:
        record: checked, with one source image and the mask as its target; in ``extra``, optional ``box`` and ``points``
            in pixels of the upright original, and ``img_width`` and ``img_height``, the image's size before the
            dataset's authors resized it.

    Raises:
        Rejected: a damaged image; a mask that is empty or of another size than the image; a malformed box or point.
    """
    extra = record.extra
    box, points = extra.get("box"), extra.get("points")
    with prefix_rejections("image"):
        image = store.prepare(record.source_images[0], record.id, "image", STRETCHED)
    size, found = image.original_size, original_size(record.target_image)
    if found not in (size, (extra.get("img_width"), extra.get("img_height"))):
        message = f"the mask is {found[0]}x{found[1]} pixels, the upright image {size[0]}x{size[1]}"
        raise Rejected("wrong_mask_size", message, "Give the mask the size of the upright image")
    with prefix_rejections("mask"):
        stored = store.prepare(record.target_image, record.id, "mask", MASK)
    mask = read_mask(store.folder / stored.name)
    if not mask.any():
        message = f"the mask is empty at {store.width}x{store.height} pixels"
        remedy = "Draw the object in white on black; for a small one, raise data.height and data.width"
        raise Rejected("empty_mask", message, remedy)
    to = (store.width, store.height)
    placed = {
        "box": box_of(mask) if box is None else placed_box(box, size, to),
        "points": inner_points(mask, _POINTS) if points is None else placed_points(points, size, to),
    }
    given = json.loads(record.metadata)
    for key in placed:
        if given.get(key) != extra.get(key):
            remedy = f"Move {key} from the metadata to the record's top level, or rename it"
            raise Rejected("ambiguous_key", f"the metadata have a {key}, which the prepared one would replace", remedy)
    metadata = json.dumps({**given, **placed}, ensure_ascii=False, sort_keys=True)
    return replace(record, metadata=metadata), image, stored


def placed_box(value: Any, size: Size, to: Size) -> Box:
    """Maps ``[x1, y1, x2, y2]`` on an image of size ``size`` to the same image stretched to size ``to``.

    In many datasets a box may end at the image's width or height, one past the last pixel; it is clamped to that pixel.
    """
    if not _are_numbers(value, 4):
        raise wrong_type("box", "[x1, y1, x2, y2], four numbers in pixels", value)
    x1, y1, x2, y2 = map(float, value)
    if x2 < x1 or y2 < y1:
        message = f"box {value} ends before it begins: x2 must not be less than x1, nor y2 than y1"
        raise Rejected("wrong_box", message, "Give the corners as [x1, y1, x2, y2], not a width and height")
    (left, top), (right, bottom) = (_placed("box", corner, size, to, beyond=1) for corner in ((x1, y1), (x2, y2)))
    return left, top, right, bottom


def placed_points(value: Any, size: Size, to: Size) -> list[Point]:
    """Maps ``[[x, y], ...]`` like `placed_box`."""
    if not isinstance(value, list | tuple) or not value or not all(_are_numbers(point, 2) for point in value):
        raise wrong_type("points", "[[x, y], ...], a list of pairs of numbers in pixels", value)
    return [_placed("points", (float(x), float(y)), size, to, beyond=0.5) for x, y in value]


def _are_numbers(value: Any, count: int) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == count
        and all(type(number) in (int, float) and abs(number) < _LARGEST for number in value)
    )


def _placed(key: str, point: Point, size: Size, to: Size, beyond: float) -> Point:
    """Keeps the position relative to the image; the centre of the first pixel is half a pixel inside the edge.

    ``beyond``: how many pixels past the centre of the last pixel are still accepted.
    """
    (x, y), (width, height), (to_width, to_height) = point, size, to
    if not (-0.5 <= x <= width - 1 + beyond and -0.5 <= y <= height - 1 + beyond):
        message = f"{key}: ({x:g}, {y:g}) lies outside the image of {width}x{height} pixels"
        raise Rejected(f"wrong_{key}", message, "Give absolute pixels of the upright image at its own size")
    if key == "box":
        x, y = min(x, width - 1), min(y, height - 1)
    return (x + 0.5) * to_width / width - 0.5, (y + 0.5) * to_height / height - 0.5
