"""Which column of a row is which field of a record."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from visual_grpo.config import Task
from visual_grpo.data.record import EmbeddedImage, Item, Place, Record, Rejected, is_image_name, wrong_type

PICTURES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "text", "caption", "instruction", "edit_prompt", "edit"),
    "source_images": ("source_image", "source", "source_img", "input_image", "original_image"),
    "target_image": ("target_image", "target", "target_img", "edited_image", "output_image", "file_name", "image"),
}
"""Field -> columns in datasets of pictures and edits, such as InstructPix2Pix's, MagicBrush's, the hub's image folders.
The first is the key of ``records.jsonl``."""
QUERIES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "query", "problem", "text", "caption"),
    "source_images": ("source_image", "image", "file_name"),
    "target_image": ("target_image", "mask"),
}
"""Field -> columns in queries about an image, as in Seg-Zero's datasets (arXiv 2503.06520)."""
_BRACKETS = str.maketrans("()", "[]")


def record_from_row(row: Mapping[str, Any], place: Place, folder: Path, task: Task, *, canonical: bool = False) -> Item:
    """Returns the record of a row, or its rejection.

    Args:
        folder: base of the row's relative paths.
        canonical: a row of records.jsonl: with a ``prompt``, only the first names of `PICTURES` are fields.
    """
    extra = dict(row)
    record_id, group = extra.pop("id", None), extra.pop("group", None)
    names = QUERIES if task == "segmentation" else _picture_columns(row, task, canonical)
    fields = {field: _take(extra, columns) for field, columns in names.items()}
    if task == "segmentation":
        try:
            fields["target_image"] = _take_prompts_of_mask(extra, fields["target_image"], record_id, folder)
        except Rejected as rejected:
            return rejected.at(place, record_id)
    if canonical or isinstance(extra.get("metadata"), Mapping):
        fields["metadata"] = extra.pop("metadata", None)
    if not canonical:
        extra = {key: value for key, value in extra.items() if key in ("box", "points") or _is_plain(value)}
    return Record(place=place, folder=folder, id=record_id, group=group, **fields, extra=extra)


def _picture_columns(row: Mapping[str, Any], task: Task, canonical: bool) -> dict[str, list[str]]:
    if canonical and "prompt" in row and (task != "i2i" or "source_image" in row):
        return {field: [columns[0]] for field, columns in PICTURES.items()}
    names = {
        # A column "source" may also say where a picture comes from.
        field: [name for name in columns if name in (columns[0], "file_name") or _is_image(row.get(name))]
        for field, columns in PICTURES.items()
    }
    # The hub's image folders have their captions in "text", and may have another column "prompt".
    return names | {"prompt": [*(["text"] if "file_name" in row else []), *PICTURES["prompt"]]}


def _take(extra: dict[str, Any], names: tuple[str, ...] | list[str]) -> Any:
    """Removes the first column with a value from ``extra`` and returns it; if none has a value, the first column."""
    present = sorted((name for name in names if name in extra), key=lambda name: extra[name] is None)
    return extra.pop(present[0]) if present else None


def _take_prompts_of_mask(extra: dict[str, Any], mask: Any, record_id: Any, folder: Path) -> Any:
    """Returns the mask; leaves ``box`` and ``points`` in ``extra``, where the row has them."""
    box = _take(extra, ("box", "bbox"))
    solution_box, solution_points = parse_solution(extra.pop("solution", None))
    if isinstance(mask, list):
        mask = mask_image(mask, "the mask")
    if mask is None and solution_box is not None and record_id is not None:
        # Seg-Zero's masks lie next to the tables or, for tables in ``data``, next to that folder.
        parent = "../" if folder.name == "data" and (folder / "../masks").is_dir() else ""
        mask = f"{parent}masks/{record_id}.png"
    box = solution_box if box is None else box
    points = extra.get("points", solution_points)
    extra |= {name: value for name, value in (("box", box), ("points", points)) if value is not None}
    return mask


def _is_image(value: Any) -> bool:
    if isinstance(value, list) and value:
        return all(map(_is_image, value))
    return isinstance(value, EmbeddedImage | Path) or (isinstance(value, str) and is_image_name(value))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def mask_image(rows: Any, name: str) -> EmbeddedImage:
    """Returns a PNG of rows of bools or numbers, not 0 inside."""
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
