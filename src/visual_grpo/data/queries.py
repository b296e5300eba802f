"""Boxes, points and masks in queries about an image, as Seg-Zero's datasets and COCO have them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from visual_grpo.data.record import EmbeddedImage, Rejected, wrong_type

_BRACKETS = str.maketrans("()", "[]")
_MIN_MARGIN = 2.0
"""Pixels by which a box or a point may miss the object, at least, and as a share of the object's longer side."""
_MARGIN = 0.05
_INSIDE = 0.95
"""Share of the object's pixels that its box must have within that margin: masks have stray pixels."""
_MAX_COORDINATE = 1e9
"""Largest coordinate, in pixels: excludes infinity, NaN and integers beyond all floats."""
_UNITS = {"in pixels": 0, "as fractions of the image's size": 1, "in thousandths of the image's size": 1000}
_BOXES: dict[str, Callable[[float, float, float, float], tuple[float, ...]]] = {
    "[x1, y1, x2, y2]": lambda x1, y1, x2, y2: (x1, y1, x2, y2),
    "[x, y, width, height]": lambda x, y, width, height: (x, y, x + width, y + height),
    "[centre x, centre y, width, height]": lambda x, y, w, h: (x - w / 2, y - h / 2, x + w / 2, y + h / 2),
    "[y1, x1, y2, x2]": lambda y1, x1, y2, x2: (x1, y1, x2, y2),
}
_POINTS: dict[str, Callable[[float, float], tuple[float, ...]]] = {
    "[x, y]": lambda x, y: (x, y),
    "[y, x]": lambda y, x: (x, y),
}


def require_fit(box: Any, points: Any, mask: np.ndarray) -> None:
    """Rejects a box that does not contain the object of a mask (bool [height, width]), and a point outside it.

    A margin is allowed around the object: 2 pixels, or a twentieth of its longer side if that is more. A larger box
    may be meant so. The message has both numbers, and the convention by which the given ones would fit.
    """
    remedy = "Correct it, or leave it out: it is then computed from the mask"
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    extent = (int(columns[0]), int(rows[0]), int(columns[-1]), int(rows[-1]))
    margin = max(_MIN_MARGIN, _MARGIN * max(extent[2] - extent[0] + 1, extent[3] - extent[1] + 1))
    if box is not None:
        if not are_numbers(box, 4):
            raise wrong_type("box", "[x1, y1, x2, y2], four numbers in pixels", box)
        if _within(mask, box, margin) < _INSIDE * mask.sum():
            message = f"box {list(box)} does not contain the object, whose box in the mask is {list(extent)}"
            fit = _would_fit(_BOXES, [box], mask, lambda at: bool(np.abs(np.subtract(at, extent)).max() <= margin))
            raise Rejected("wrong_box", message + fit, f"Give [x1, y1, x2, y2] in pixels. {remedy}")
    if points is not None:
        if not isinstance(points, list | tuple) or not points or not all(are_numbers(point, 2) for point in points):
            raise wrong_type("points", "[[x, y], ...], a list of pairs of numbers in pixels", points)
        outside = [point for point in points if not _within(mask, (*point, *point), margin)]
        if outside:
            message = f"point {list(outside[0])} lies outside the object, whose box in the mask is {list(extent)}"
            fit = _would_fit(_POINTS, points, mask, lambda at: all(_within(mask, (*xy, *xy), margin) for xy in at))
            raise Rejected("wrong_points", message + fit, f"Give [x, y] in pixels. {remedy}")


def are_numbers(value: Any, count: int) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == count
        and all(type(number) in (int, float) and abs(number) < _MAX_COORDINATE for number in value)
    )


def _within(mask: np.ndarray, box: Sequence[float], margin: float) -> int:
    """Returns the number of the object's pixels in a box that is widened by a margin."""
    x1, y1 = (max(0, math.ceil(number - margin)) for number in box[:2])
    x2, y2 = (max(0, math.floor(number + margin) + 1) for number in box[2:])
    return int(mask[y1:y2, x1:x2].sum())


def _would_fit(
    orders: Mapping[str, Callable[..., tuple[float, ...]]],
    values: Sequence[Any],
    mask: np.ndarray,
    fits: Callable[[list[np.ndarray]], bool],
) -> str:
    """Returns the convention by which the values, in pixels, would fit, as the end of a message; "" for none."""
    height, width = mask.shape
    for unit, whole in _UNITS.items():
        scale = np.array([width, height] * 2) / whole if whole else np.ones(4)
        for order, corners in orders.items():
            if fits([np.multiply(corners(*value), scale[: len(value)]) for value in values]):
                return f"; read as {order} {unit}, it would fit"
    return ""


def mask_image(rows: Any, name: str) -> EmbeddedImage:
    """Returns a mask of rows of bools or numbers as a file, which is read like a dataset's masks."""
    try:
        pixels = np.asarray(rows)
    except ValueError:  # Rows of different lengths.
        pixels = np.zeros(0)
    if pixels.ndim != 2 or not pixels.size or pixels.dtype.kind not in "biuf":
        message = "mask must be rows of equal length of bools or numbers"
        raise Rejected("corrupt_image", message, "Correct the mask or store it as an image")
    file = BytesIO()
    if len(values := np.unique(pixels[pixels != 0])) < 2 and set(values) <= {1, 255}:
        Image.fromarray(pixels != 0).save(file, "PNG", compress_level=1)
    else:
        Image.fromarray(pixels.astype(np.float32)).save(file, "TIFF")
    return EmbeddedImage(name, file.getvalue())


def parse_solution(solution: Any) -> tuple[list[float] | None, list[Any] | None]:
    """Returns box and points of Seg-Zero's column ``solution``; None for a missing one.

    It is ``<box>(x1,y1),(x2,y2)</box><points>(x1,y1),...</points>`` or JSON
    ``[{"bbox_2d": [x1, y1, x2, y2], "point_2d": [x, y]}, ...]``, several objects giving the box around all of them.
    Raises Rejected for any other format.
    """
    if not solution:
        return None, None
    try:
        solution = json.dumps(solution) if not isinstance(solution, str) else solution
        tags = dict(re.findall(r"<(box|points)>([^<]*)</\1>", solution))
        if tags:
            # Pairs in parentheses are JSON in brackets.
            pairs = {tag: json.loads(f"[{body.translate(_BRACKETS)}]") for tag, body in tags.items()}
            box = [float(number) for x, y in pairs.get("box", ()) for number in (x, y)]
            points = [[float(x), float(y)] for x, y in pairs.get("points", ())]
            if not box and not points:
                raise ValueError(solution)
            return box or None, points or None
        objects = json.loads(solution)
        objects = objects if isinstance(objects, list) else [objects]
        corners = [[float(number) for number in part["bbox_2d"]] for part in objects]
        points = [part["point_2d"] for part in objects if part.get("point_2d") is not None]
        if not corners:
            return None, None
        lefts, tops, rights, bottoms = zip(*corners, strict=True)
        return [min(lefts), min(tops), max(rights), max(bottoms)], points or None
    except (AttributeError, ValueError, KeyError, TypeError, RecursionError) as error:
        form = "<box>(x1,y1),(x2,y2)</box><points>(x,y),...</points>, or JSON objects with bbox_2d and point_2d"
        raise wrong_type("solution", form, solution) from error
