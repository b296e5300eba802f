"""Maps the columns of a row to the fields of a record: which column is the prompt, which an image."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from visual_grpo.config import Task
from visual_grpo.records.guard import is_image_name
from visual_grpo.records.raw import EmbeddedImage, Item, Place, RawRecord, Rejected, shorten, wrong_type

KEYS = ("prompt", "id", "target_image", "source_image", "group", "metadata")
"""Keys of ``records.jsonl``."""

PROMPTS = ("prompt", "text", "caption", "instruction", "edit_prompt", "edit")
SOURCES = ("source_image", "source", "source_img", "input_image", "original_image")
TARGETS = ("target_image", "target", "target_img", "edited_image", "output_image", "file_name", "image")
"""Names in datasets of pictures and edits, such as InstructPix2Pix's, MagicBrush's and the hub's image folders."""

QUERIES = {
    "prompt": ("prompt", "query", "problem"),
    "source_images": ("source_image", "image"),
    "target_image": ("target_image", "mask"),
    "box": ("box", "bbox"),
}
"""Names in queries about an image, as in Seg-Zero's datasets (arXiv 2503.06520)."""
QUERY_KEYS = ("image", "query", "problem", "mask", "box", "bbox", "points")
"""Keys that segmentation accepts in addition to those of records.jsonl."""

_PAIR = r"\(([^,()]+),([^,()]+)\)"


def record_of(row: Mapping[str, Any], place: Place, folder: Path, task: Task, *, canonical: bool = False) -> Item:
    """Returns the record of a row, or its rejection.

    Args:
        folder: base of the row's relative paths.
        canonical: a row of records.jsonl: with a ``prompt``, only the names in `KEYS` are fields, and any other column
            is metadata.
    """
    extra = dict(row)
    record_id, group = extra.pop("id", None), extra.pop("group", None)
    try:
        if task == "segmentation":
            fields = _query(extra, record_id, folder)
        else:
            named = canonical and "prompt" in row and (task != "i2i" or "source_image" in row)
            fields = _picture(extra, only_keys=named)
    except Rejected as rejected:
        return rejected.at(place, None if record_id is None else shorten(str(record_id)))
    if canonical or isinstance(extra.get("metadata"), Mapping):
        fields["metadata"] = extra.pop("metadata", None)
    return RawRecord(
        place=place,
        folder=folder,
        id=record_id,
        group=group,
        **fields,
        extra=extra
        if canonical
        else {key: value for key, value in extra.items() if key in ("box", "points") or _is_plain(value)},
    )


def _picture(extra: dict[str, Any], *, only_keys: bool) -> dict[str, Any]:
    """Takes prompt and images out of ``extra``."""
    count = 1 if only_keys else None
    prompts = ("text", *PROMPTS) if "file_name" in extra and not only_keys else PROMPTS
    fields = {"prompt": _take(extra, prompts[:count])}
    for field, names in (("source_images", SOURCES), ("target_image", TARGETS)):
        # A column "source" may also say where a picture comes from.
        known = [name for name in names[:count] if name in (names[0], "file_name") or _is_image(extra.get(name))]
        fields[field] = _take(extra, known)
    return fields


def _take(extra: dict[str, Any], names: Sequence[str]) -> Any:
    """Takes the first column that has a value out of ``extra``."""
    present = [name for name in names if name in extra]
    chosen = next((name for name in present if extra[name] is not None), present[0] if present else None)
    return None if chosen is None else extra.pop(chosen)


def _query(extra: dict[str, Any], record_id: Any, folder: Path) -> dict[str, Any]:
    """Takes query, image and mask out of ``extra``; box and points stay there, as ``box`` and ``points``."""
    fields = {field: _only({name: extra.pop(name, None) for name in names}) for field, names in QUERIES.items()}
    for field, names in (("prompt", ("text", "caption")), ("source_images", ("file_name",))):
        if fields[field] is None:
            fields[field] = _take(extra, names)
    if isinstance(fields["target_image"], list):
        fields["target_image"] = _mask_of(fields["target_image"])
    box, points = box_and_points(extra.pop("solution", None))
    if fields["target_image"] is None and box is not None and record_id is not None:
        fields["target_image"] = _mask_beside(record_id, folder)
    given = fields.pop("box")
    for name, value in (("box", box if given is None else given), ("points", extra.get("points", points))):
        if value is not None:
            extra[name] = value
    return fields


def _only(values: dict[str, Any]) -> Any:
    """The value that is given under one or more of the names; None if it is given under none.

    Raises:
        Rejected: two names have different values.
    """
    given = {name: value for name, value in values.items() if value is not None}
    first, *others = given.items() or [("", None)]
    for name, value in others:
        if value != first[1]:
            raise Rejected(
                "ambiguous_key",
                f"{first[0]} and {name} are both given, and differ",
                "Keep only one of them: they are two names of the same field",
            )
    return first[1]


def _is_image(value: Any) -> bool:
    if isinstance(value, list) and value:
        return all(map(_is_image, value))
    return isinstance(value, EmbeddedImage | Path) or (isinstance(value, str) and is_image_name(value))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _mask_of(rows: list[Any]) -> EmbeddedImage:
    """A mask that is stored as rows of bools or numbers, not 0 inside."""
    import numpy as np

    try:
        pixels = np.asarray(rows)
    except ValueError:
        pixels = np.zeros(0)
    if pixels.ndim != 2 or not pixels.size or pixels.dtype.kind not in "biuf":
        message = "mask must be rows of equal length of bools or numbers"
        raise Rejected("corrupt_image", message, "Correct the mask or store it as an image")
    return mask_image(pixels != 0, "the mask")


def mask_image(pixels: Any, name: str) -> EmbeddedImage:
    """A PNG of a bool array [height, width]."""
    from PIL import Image

    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return EmbeddedImage(name, file.getvalue())


def _mask_beside(record_id: Any, folder: Path) -> str:
    """Seg-Zero's masks lie next to the tables or, for tables in ``data``, next to that folder."""
    beside = f"masks/{record_id}.png"
    return f"../{beside}" if folder.name == "data" and (folder / "../masks").is_dir() else beside


def box_and_points(solution: Any) -> tuple[list[float] | None, list[Any] | None]:
    """Box and points of Seg-Zero's column ``solution``; None for what it lacks.

    It is ``<box>(x1,y1),(x2,y2)</box><points>(x1,y1),...</points>`` or JSON
    ``[{"bbox_2d": [x1, y1, x2, y2], "point_2d": [x, y]}, ...]``, several objects giving the box around all of them.

    Raises:
        Rejected: it has neither format.
    """
    if solution is None or solution == "":
        return None, None
    try:
        if solution.lstrip().startswith(("[", "{")):
            return _solution_json(json.loads(solution))
        return _solution_tags(solution)
    except (AttributeError, ValueError, KeyError, TypeError, RecursionError) as error:
        form = "<box>(x1,y1),(x2,y2)</box><points>(x,y),...</points>, or JSON objects with bbox_2d and point_2d"
        raise wrong_type("solution", form, solution) from error


def _solution_tags(text: str) -> tuple[list[float] | None, list[Any] | None]:
    pairs: dict[str, list[list[float]]] = {}
    for tag in ("box", "points"):
        _, opened, rest = text.partition(f"<{tag}>")
        body, closed, _ = rest.partition(f"</{tag}>")
        if opened and closed:
            if re.sub(rf"{_PAIR}|[\s,]", "", body):
                raise ValueError(body)
            pairs[tag] = [[float(x), float(y)] for x, y in re.findall(_PAIR, body)]
    if not pairs:
        raise ValueError(text)
    box = pairs.get("box")
    return None if box is None else [number for pair in box for number in pair], pairs.get("points")


def _solution_json(found: Any) -> tuple[list[float] | None, list[Any] | None]:
    objects = found if isinstance(found, list) else [found]
    boxes = [[float(number) for number in part["bbox_2d"]] for part in objects]
    points = [part["point_2d"] for part in objects if part.get("point_2d") is not None]
    if not boxes:
        return None, None
    lefts, tops, rights, bottoms = zip(*boxes, strict=True)
    return [min(lefts), min(tops), max(rights), max(bottoms)], points or None
