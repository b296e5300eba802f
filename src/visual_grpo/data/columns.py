"""Maps the columns of a row to the fields of a record: which column is the prompt, which an image."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from visual_grpo.config import Task
from visual_grpo.data.guard import is_image_name
from visual_grpo.data.raw import EmbeddedImage, Item, Place, RawRecord, Rejected, shorten, wrong_type

KEYS = ("prompt", "id", "target_image", "source_image", "group", "metadata")
"""Keys of ``data.jsonl``."""

PROMPTS = ("prompt", "text", "caption", "instruction", "edit_prompt", "edit")
SOURCES = ("source_image", "source", "source_img", "input_image", "original_image")
TARGETS = ("target_image", "target", "target_img", "edited_image", "output_image", "file_name", "image")
"""Names in datasets of pictures and edits, such as InstructPix2Pix's, MagicBrush's and the hub's image folders."""

QUERIES = ("prompt", "query", "problem", "text", "caption")
QUERY_KEYS = ("image", "query", "problem", "mask", "box", "bbox", "points")
"""Names in queries about an image, as in Seg-Zero's datasets (arXiv 2503.06520)."""

_PAIR = r"\(([^,()]+),([^,()]+)\)"


def record_of(row: Mapping[str, Any], place: Place, folder: Path, task: Task, *, canonical: bool = False) -> Item:
    """Returns the record of a row, or its rejection.

    Args:
        folder: base of the row's relative paths.
        canonical: a row of records.jsonl: with a ``prompt``, only the names in `KEYS` are fields.
    """
    extra = dict(row)
    record_id, group = extra.pop("id", None), extra.pop("group", None)
    try:
        if task == "segmentation":
            fields = _query(extra, record_id, folder)
        else:
            fields = _picture(extra, canonical and "prompt" in row and (task != "i2i" or "source_image" in row))
    except Rejected as rejected:
        return rejected.at(place, None if record_id is None else shorten(str(record_id)))
    if canonical or isinstance(extra.get("metadata"), Mapping):
        fields["metadata"] = extra.pop("metadata", None)
    if not canonical:
        extra = {key: value for key, value in extra.items() if key in ("box", "points") or _is_plain(value)}
    return RawRecord(place=place, folder=folder, id=record_id, group=group, **fields, extra=extra)


def _picture(extra: dict[str, Any], only_keys: bool) -> dict[str, Any]:
    """Takes prompt and images out of ``extra``."""
    if only_keys:
        prompts, sources, targets = [PROMPTS[0]], [SOURCES[0]], [TARGETS[0]]
    else:
        # The hub's image folders have their captions in "text", and may have another column "prompt".
        prompts = [*(["text"] if "file_name" in extra else []), *PROMPTS]
        # A column "source" may also say where a picture comes from.
        sources, targets = (
            [name for name in names if name in (names[0], "file_name") or _is_image(extra.get(name))]
            for names in (SOURCES, TARGETS)
        )
    return {
        "prompt": _take(extra, prompts),
        "source_images": _take(extra, sources),
        "target_image": _take(extra, targets),
    }


def _query(extra: dict[str, Any], record_id: Any, folder: Path) -> dict[str, Any]:
    """Takes query, image and mask out of ``extra``; box and points stay there, as ``box`` and ``points``."""
    prompt, image = _take(extra, QUERIES), _take(extra, ("source_image", "image", "file_name"))
    mask, box = _take(extra, ("target_image", "mask")), _take(extra, ("box", "bbox"))
    solved_box, points = box_and_points(extra.pop("solution", None))
    if isinstance(mask, list):
        mask = _mask_of(mask)
    if mask is None and solved_box is not None and record_id is not None:
        # Seg-Zero's masks lie next to the tables or, for tables in ``data``, next to that folder.
        beside = "../" if folder.name == "data" and (folder / "../masks").is_dir() else ""
        mask = f"{beside}masks/{record_id}.png"
    for name, value in (("box", solved_box if box is None else box), ("points", extra.get("points", points))):
        if value is not None:
            extra[name] = value
    return {"prompt": prompt, "source_images": image, "target_image": mask}


def _take(extra: dict[str, Any], names: Sequence[str]) -> Any:
    """Takes the first column that has a value out of ``extra``, else the first one that is there."""
    present = sorted((name for name in names if name in extra), key=lambda name: extra[name] is None)
    return extra.pop(present[0]) if present else None


def _is_image(value: Any) -> bool:
    if isinstance(value, list) and value:
        return all(map(_is_image, value))
    return isinstance(value, EmbeddedImage | Path) or (isinstance(value, str) and is_image_name(value))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _mask_of(rows: list[Any]) -> EmbeddedImage:
    """A mask that is stored as rows of bools or numbers, not 0 inside."""
    try:
        pixels = np.asarray(rows)
    except ValueError:  # Rows of different lengths.
        pixels = np.zeros(0)
    if pixels.ndim != 2 or not pixels.size or pixels.dtype.kind not in "biuf":
        message = "mask must be rows of equal length of bools or numbers"
        raise Rejected("corrupt_image", message, "Correct the mask or store it as an image")
    return mask_image(pixels != 0, "the mask")


def mask_image(pixels: np.ndarray, name: str) -> EmbeddedImage:
    """A PNG of a bool array [height, width]."""
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return EmbeddedImage(name, file.getvalue())


def box_and_points(solution: Any) -> tuple[list[float] | None, list[Any] | None]:
    """Box and points of Seg-Zero's column ``solution``; None for what it lacks.

    It is ``<box>(x1,y1),(x2,y2)</box><points>(x1,y1),...</points>`` or JSON
    ``[{"bbox_2d": [x1, y1, x2, y2], "point_2d": [x, y]}, ...]``, several objects giving the box around all of them.

    Raises:
        Rejected: it has neither format.
    """
    if not solution:
        return None, None
    try:
        if not solution.lstrip().startswith(("[", "{")):
            box, points = (_pairs_in(tag, solution) for tag in ("box", "points"))
            if box is points is None:
                raise ValueError(solution)
            return None if box is None else [number for pair in box for number in pair], points
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


def _pairs_in(tag: str, text: str) -> list[list[float]] | None:
    _, _, rest = text.partition(f"<{tag}>")
    body, closed, _ = rest.partition(f"</{tag}>")
    if re.sub(rf"{_PAIR}|[\s,]", "", body if closed else ""):
        raise ValueError(body)
    return [[float(x), float(y)] for x, y in re.findall(_PAIR, body)] if closed else None
