"""Boxes, points and masks in queries about an image, as Seg-Zero's datasets and COCO have them."""

from __future__ import annotations

import json
import re
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from visual_grpo.data.record import EmbeddedImage, Rejected, wrong_type

_BRACKETS = str.maketrans("()", "[]")


def mask_image(rows: Any, name: str) -> EmbeddedImage:
    """Returns a PNG of a mask of rows of bools or numbers, not 0 inside."""
    try:
        pixels = np.asarray(rows)
    except ValueError:  # Rows of different lengths.
        pixels = np.zeros(0)
    if pixels.ndim != 2 or not pixels.size or pixels.dtype.kind not in "biuf":
        message = "mask must be rows of equal length of bools or numbers"
        raise Rejected("corrupt_image", message, "Correct the mask or store it as an image")
    file = BytesIO()
    Image.fromarray(pixels != 0).save(file, "PNG", compress_level=1)
    return EmbeddedImage(name, file.getvalue())


def parse_solution(solution: Any) -> tuple[list[float] | None, list[Any] | None]:
    """Returns box and points of Seg-Zero's column ``solution``; None for a missing one.

    It is ``<box>(x1,y1),(x2,y2)</box><points>(x1,y1),...</points>`` or JSON
    ``[{"bbox_2d": [x1, y1, x2, y2], "point_2d": [x, y]}, ...]``, several objects giving the box around all of them.

    Raises:
        Rejected: it has neither format.
    """
    if not solution:
        return None, None
    try:
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
