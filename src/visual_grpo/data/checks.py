"""From a row to a checked record: which column is which field, and whether the values are usable.

Nothing here opens an image or leaves the data's folder.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from visual_grpo.common.errors import nearest
from visual_grpo.config import Task
from visual_grpo.data.record import (
    EmbeddedImage,
    Item,
    Limits,
    Original,
    Place,
    Record,
    Rejected,
    is_image_name,
    shorten,
    wrong_type,
)

KEYS = ("prompt", "id", "target_image", "source_image", "group", "metadata")
"""Keys of ``records.jsonl``."""
PROMPTS = ("prompt", "text", "caption", "instruction", "edit_prompt", "edit")
SOURCES = ("source_image", "source", "source_img", "input_image", "original_image")
TARGETS = ("target_image", "target", "target_img", "edited_image", "output_image", "file_name", "image")
"""Names in datasets of pictures and edits, such as InstructPix2Pix's, MagicBrush's and the hub's image folders."""
QUERIES = ("prompt", "query", "problem", "text", "caption")
QUERY_KEYS = ("image", "query", "problem", "mask", "box", "bbox", "points")
"""Names in queries about an image, as in Seg-Zero's datasets (arXiv 2503.06520)."""

_FIELDS = {
    **dict.fromkeys(("query", "problem"), "prompt"),
    **dict.fromkeys(("source_image", "image"), "source_images"),
    "mask": "target_image",
}
"""Keys that are named differently from their field of `Record`."""
_MAX_PROMPT = 20_000
"""Characters: several times what the longest text encoder reads."""
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202d\u202e]")
"""Control characters other than tab and line breaks, and overrides of the writing direction: with one, a prompt shows
another text than the model reads."""
_PAIR = r"\(([^,()]+),([^,()]+)\)"


def record_from_row(row: Mapping[str, Any], place: Place, folder: Path, task: Task, *, canonical: bool = False) -> Item:
    """Returns the record of a row, or its rejection.

    Args:
        folder: base of the row's relative paths.
        canonical: a row of records.jsonl: with a ``prompt``, only the names in `KEYS` are fields.
    """
    extra = dict(row)
    record_id, group = extra.pop("id", None), extra.pop("group", None)
    try:
        if task == "segmentation":
            fields = _query_fields(extra, record_id, folder)
        else:
            fields = _picture_fields(extra, canonical and "prompt" in row and (task != "i2i" or "source_image" in row))
    except Rejected as rejected:
        return rejected.at(place, record_id)
    if canonical or isinstance(extra.get("metadata"), Mapping):
        fields["metadata"] = extra.pop("metadata", None)
    if not canonical:
        extra = {key: value for key, value in extra.items() if key in ("box", "points") or _is_plain(value)}
    return Record(place=place, folder=folder, id=record_id, group=group, **fields, extra=extra)


def _picture_fields(extra: dict[str, Any], only_keys: bool) -> dict[str, Any]:
    """Removes prompt and images from ``extra`` and returns them."""
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


def _query_fields(extra: dict[str, Any], record_id: Any, folder: Path) -> dict[str, Any]:
    """Removes query, image and mask from ``extra`` and returns them; ``box`` and ``points`` stay there."""
    prompt, image = _take(extra, QUERIES), _take(extra, ("source_image", "image", "file_name"))
    mask, box = _take(extra, ("target_image", "mask")), _take(extra, ("box", "bbox"))
    solution_box, solution_points = parse_solution(extra.pop("solution", None))
    if isinstance(mask, list):
        mask = _mask_from_rows(mask)
    if mask is None and solution_box is not None and record_id is not None:
        # Seg-Zero's masks lie next to the tables or, for tables in ``data``, next to that folder.
        parent = "../" if folder.name == "data" and (folder / "../masks").is_dir() else ""
        mask = f"{parent}masks/{record_id}.png"
    box = solution_box if box is None else box
    for name, value in (("box", box), ("points", extra.get("points", solution_points))):
        if value is not None:
            extra[name] = value
    return {"prompt": prompt, "source_images": image, "target_image": mask}


def _take(extra: dict[str, Any], names: Sequence[str]) -> Any:
    """Removes the first column with a value from ``extra`` and returns it; if none has a value, the first column."""
    present = sorted((name for name in names if name in extra), key=lambda name: extra[name] is None)
    return extra.pop(present[0]) if present else None


def _is_image(value: Any) -> bool:
    if isinstance(value, list) and value:
        return all(map(_is_image, value))
    return isinstance(value, EmbeddedImage | Path) or (isinstance(value, str) and is_image_name(value))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _mask_from_rows(rows: list[Any]) -> EmbeddedImage:
    """Returns a mask that is stored as rows of bools or numbers, not 0 inside."""
    try:
        pixels = np.asarray(rows)
    except ValueError:  # Rows of different lengths.
        pixels = np.zeros(0)
    if pixels.ndim != 2 or not pixels.size or pixels.dtype.kind not in "biuf":
        message = "mask must be rows of equal length of bools or numbers"
        raise Rejected("corrupt_image", message, "Correct the mask or store it as an image")
    return mask_image(pixels != 0, "the mask")


def mask_image(pixels: np.ndarray, name: str) -> EmbeddedImage:
    """Returns a PNG of a bool array [height, width]."""
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
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


def checked(record: Record, task: Task, limits: Limits) -> Record:
    """Returns the record with values of the right types and images that exist.

    Raises:
        Rejected: at the first value that is invalid or does not suit the task.
    """
    is_query = task == "segmentation"
    prompt, source, target = ("query", "image", "mask") if is_query else ("prompt", "source_image", "target_image")
    _typo_check(record, is_query)
    images = [] if record.source_images is None else record.source_images
    images = images if isinstance(images, list) else [images]
    kind = target.removesuffix("_image")
    valid = replace(
        record,
        prompt=_check_prompt(record, prompt),
        id=_check_label(record.id, "id").strip(),
        source_images=tuple(_check_image(record.folder, source, "source", image, limits) for image in images),
        target_image=None
        if record.target_image is None
        else _check_image(record.folder, target, kind, record.target_image, limits),
        group=None if record.group is None else _check_label(record.group, "group"),
        metadata=_join_metadata(record),
    )
    _check_task(task, valid)
    return valid


def _typo_check(record: Record, is_query: bool) -> None:
    """Rejects a key that resembles a known, missing one: without its target, the record would train as another."""
    known = (*KEYS, *QUERY_KEYS) if is_query else KEYS
    values = {**vars(record), **{name: record.extra.get(name) for name in ("box", "bbox", "points")}}
    missing = {name.replace("_", ""): name for name in known if values[_FIELDS.get(name, name)] is None}
    for key in record.extra:
        # A leading sign comments a key out; a number or the code of a language makes another name.
        if key[:1].isalpha() and key not in known and len(key) < 20:
            meant = nearest(re.sub(r"[\W_]", "", key).lower(), missing, cutoff=0.83)
            if meant is not None and not key[-1].isdigit():
                hint = f"there is no field {key!r}. Did you mean {missing[meant]!r}?"
                raise Rejected("unknown_key", hint, "Rename it, or begin it with _")


def _check_prompt(record: Record, key: str) -> str:
    if record.prompt is None:
        known = f"; the record has {shorten(', '.join(map(repr, record.extra)))}" if record.extra else ""
        raise Rejected("empty_prompt", f"there is no {key}{known}", f"Add it as {key}, or remove the record")
    if not isinstance(record.prompt, str):
        raise wrong_type(key, "text", record.prompt)
    text = record.prompt.strip()
    _check_utf8(text, key)
    if not text:
        raise Rejected("empty_prompt", f"the {key} is empty", "Write one or remove the record")
    if len(text) > _MAX_PROMPT:
        message = f"the {key} has {len(text):,} characters, more than {_MAX_PROMPT:,}"
        raise Rejected("prompt_too_long", message, "Shorten it: memory grows with its length")
    if (control := _CONTROL.search(text)) is not None:
        message = f"the {key} has the control character U+{ord(control[0]):04X} at character {control.start() + 1}"
        raise Rejected("control_character", message, "Remove it; line breaks and tabs may stay")
    return text


def _check_label(value: Any, key: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise wrong_type(key, "text or a whole number", value)
    _check_utf8(str(value), key)
    return str(value)


def _check_utf8(text: str, key: str) -> None:
    """Rejects bytes that are not UTF-8, which are read as surrogates, and escaped lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"the {key} is not valid UTF-8 at character {error.start + 1}"
        raise Rejected("not_utf8", message, "Save the file as UTF-8") from error


def _check_image(folder: Path, key: str, kind: str, value: Any, limits: Limits) -> Original:
    if isinstance(value, EmbeddedImage | Path):
        return value
    if not isinstance(value, str) or not value:
        raise wrong_type(key, "the path of an image", value)
    path, name = folder / value, f"{key} {shorten(value)!r}"
    try:
        limits.check(path, name)
        problem = "" if path.is_file() else f"does not exist or is not an ordinary file (looked for {path})"
    except OSError as error:  # A name that is too long, a folder that may not be entered.
        problem = f"cannot be opened ({error.strerror})"
    if problem:
        remedy = "Correct the path or add the file; URLs are not fetched"
        raise Rejected(f"missing_{kind}", f"{name} {problem}", remedy)
    return path


def _join_metadata(record: Record) -> str:
    metadata = {} if record.metadata is None else record.metadata
    if not isinstance(metadata, Mapping):
        raise wrong_type("metadata", "a JSON object", metadata)
    text = json.dumps({**record.extra, **metadata}, ensure_ascii=False, sort_keys=True)
    _check_utf8(text, "metadata")
    return text


def _check_task(task: Task, record: Record) -> None:
    sources = len(record.source_images)
    if task == "t2i" and sources:
        message = "source_image is given, but data.task is t2i"
        raise Rejected("unexpected_source", message, "Set data.task to i2i or mixed, or leave source_image out")
    if task == "i2i" and not sources:
        message = "there is no source_image, and data.task is i2i"
        raise Rejected("missing_source", message, "Add the image to edit, or set data.task to mixed or t2i")
    if task == "segmentation" and sources != 1:
        message = f"a query asks about one image, and the record has {sources}"
        reason = "several_sources" if sources else "missing_source"
        raise Rejected(reason, message, "Name the image that the query asks about (key image)")
    if task == "segmentation" and record.target_image is None:
        remedy = "Name the mask of the queried object (key mask): an image that is bright inside the object"
        raise Rejected("missing_mask", "there is no mask, and data.task is segmentation", remedy)
