"""The column ``solution`` of Seg-Zero's tables, in either of its formats."""

from __future__ import annotations

import json
import re
from typing import Any

from visual_grpo.records.coordinates import box_from
from visual_grpo.records.raw import wrong_type
from visual_grpo.records.text import check_depth

_PAIR = r"\(([^,()]+),([^,()]+)\)"


def solution_of(text: str) -> tuple[list[float] | None, list[Any] | None]:
    """Box and points of a solution in either of its two formats; None for a missing box or missing points.

    Raises:
        Rejected: the text has neither format.
    """
    try:
        found = _from_json(text) if text.lstrip().startswith(("[", "{")) else _from_tags(text)
    except (ValueError, KeyError, TypeError, RecursionError):
        found = None
    if found is None:
        raise wrong_type(
            "solution",
            "<box>(x1,y1),(x2,y2)</box><points>(x,y),...</points> or a JSON list of objects with bbox_2d and point_2d",
            text,
        )
    return found


def box_and_points(value: Any) -> tuple[list[float] | None, list[Any] | None]:
    if value is None or value == "":
        return None, None
    if not isinstance(value, str):
        raise wrong_type("solution", "text", value)
    return solution_of(value)


def _from_tags(text: str) -> tuple[list[float] | None, list[Any] | None] | None:
    """Parses ``<box>`` and ``<points>``, each optional; None if both are missing or their content is invalid."""
    tags = _tags(text)
    if not tags or any(re.sub(rf"{_PAIR}|[\s,]", "", body) for body in tags.values()):
        return None
    pairs = {tag: [[float(x), float(y)] for x, y in re.findall(_PAIR, body)] for tag, body in tags.items()}
    box, points = pairs.get("box"), pairs.get("points")
    return None if box is None else [number for pair in box for number in pair], points


def _tags(text: str) -> dict[str, str]:
    """The content of each tag, in time that grows with the length of the text only."""
    last_end = {tag: text.rfind(f"</{tag}>") for tag in ("box", "points")}
    found, at = {}, 0
    for opening in re.finditer("<(box|points)>", text):
        tag, start = opening[1], opening.end()
        if at <= opening.start() and start <= last_end[tag]:
            at = text.find(f"</{tag}>", start)
            found[tag] = text[start:at]
    return found


def _from_json(text: str) -> tuple[list[float] | None, list[Any] | None]:
    found = json.loads(text)
    check_depth(found)
    objects = found if isinstance(found, list) else [found]
    boxes = [box_from(part["bbox_2d"]) for part in objects]
    points = [part["point_2d"] for part in objects if part.get("point_2d") is not None]
    return _around(boxes) if boxes else None, points or None


def _around(boxes: list[tuple[float, float, float, float]]) -> list[float]:
    """The smallest box that contains all boxes."""
    lefts, tops, rights, bottoms = zip(*boxes, strict=True)
    return [min(lefts), min(tops), max(rights), max(bottoms)]
