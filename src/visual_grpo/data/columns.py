"""Turns a table's row into a record: which column holds what, by the names that datasets use or ``data.columns``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.common.images import ImageError, read_size
from visual_grpo.config import DataConfig
from visual_grpo.config.data import ColumnsConfig
from visual_grpo.data.queries import mask_image, parse_solution
from visual_grpo.data.record import EmbeddedImage, Place, Record, Rejected, find_file, is_image_name, shorten

PICTURES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "text", "caption", "instruction", "edit_prompt", "edit", "txt"),
    "source": (
        *("source_image", "source_images", "sources", "source", "source_img", "input_image", "input_images"),
        *("original_image", "edit_image", "control_path", "control_image"),
    ),
    "target": (
        *("target_image", "target", "target_img", "edited_image", "output_image", "file_name", "image", "image_path"),
        *("img", "png", "jpg", "jpeg", "webp", "video"),
    ),
}
"""Field -> columns in datasets of pictures and edits, such as InstructPix2Pix's, MagicBrush's, the hub's image folders,
webdataset, and the lists of other trainers. The first is the key of ``records.jsonl``. A source may be a list of
images, or several columns whose names end with a number: ``control_path_0``, ``control_path_1``."""
QUERIES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "query", "problem", "text", "caption"),
    "source": ("source_image", "image", "file_name"),
    "target": ("target_image", "mask"),
}
"""Field -> columns in queries about an image, as in Seg-Zero's datasets (arXiv 2503.06520)."""
IGNORED = "ignored"
_NUMBERED = re.compile(r"(.*?)_?(\d*)", re.DOTALL)
"""A column's name, and the number at its end."""


class _Row:
    """The columns of a row that are left, and what the used ones became."""

    def __init__(self, row: Mapping[str, Any], columns: ColumnsConfig) -> None:
        self._named = columns.named()
        self.became = {name: IGNORED for name in columns.ignored if name in row}
        self.left = {name: value for name, value in row.items() if name not in self.became}

    def take(self, field: str, known: Iterable[str], named: str | None = None) -> Any:
        """Takes the column ``named`` by hand, else the first of the ``known`` ones with a value, or the first.

        A column that is named by hand serves no other field. One in capitals counts where none has the very name.
        """
        free = [name for name in self.left if name not in self._named]
        spelt = {name.lower(): name for name in free} | {name: name for name in free}
        names = (spelt.get(name) for name in known) if named is None else [named]
        present = sorted((name for name in names if name in self.left), key=lambda name: self.left[name] is None)
        if not present:
            return None
        self.became[present[0]] = field
        return self.left.pop(present[0])

    def rest(self) -> dict[str, Any]:
        """Takes the other columns, as metadata if JSON can hold them."""
        kept = {name: held for name, value in self.left.items() if (held := _json_value(value)) is not ...}
        for name, value in self.left.items():
            self.became[name] = "empty" if value is None else "metadata" if name in kept else IGNORED
        return kept


def record_from_row(
    row: Mapping[str, Any], place: Place, folder: Path, data: DataConfig, *, canonical: bool = False
) -> Record | Rejected:
    """Returns the record of a row, whose paths are relative to ``folder``, or its rejection.

    In a ``canonical`` row, one of records.jsonl, with a ``prompt`` only the first names of `PICTURES` are fields.
    Raises UserError for a column of pictures that is not used and might be meant (`_might_be_meant`).
    """
    columns, known, by_hand = _Row(row, data.columns), _known(row, data, canonical), data.columns
    record_id, group = columns.take("id", ["id"]), columns.take("group", ["group"])
    try:
        if missing := [name for name in by_hand.named() if name not in row]:
            message = (
                f"the column {missing[0]!r} of data.columns does not exist; the columns are {shorten(', '.join(row))}"
            )
            raise Rejected("missing_column", message, f"Correct data.columns.{nearest_hint(missing[0], row)}")
        prompt = columns.take("prompt", known["prompt"], by_hand.prompt)
        target = columns.take("target", known["target"], by_hand.target)
        source = _take_sources(columns, known["source"], data, canonical)
        prompts_of_mask: dict[str, Any] = {}
        if data.task == "segmentation":
            target, prompts_of_mask = _take_prompts_of_mask(columns, target, record_id, folder)
    except Rejected as rejected:
        return rejected.at(place, record_id)
    is_object = canonical or isinstance(columns.left.get("metadata"), Mapping)
    metadata = columns.take("metadata", ["metadata"] if is_object else [])
    used = [target, *(source if isinstance(source, list) else [source])]
    unused = [name for name, value in columns.left.items() if value not in used and _is_there(value, folder)]
    if unused and _might_be_meant(unused, source, target, data):
        raise UserError(_not_used(unused, source, target, columns, place, data))
    return Record(
        place=place,
        folder=folder,
        id=record_id,
        prompt=prompt,
        source_images=source,
        target_image=target[0] if isinstance(target, list) and len(target) == 1 else target,
        group=group,
        metadata=metadata,
        extra=columns.rest() | prompts_of_mask,
        columns=columns.became,
    )


def prompt_columns(data: DataConfig) -> tuple[str, ...]:
    """Returns the columns that may hold the prompt."""
    if data.columns.prompt is not None:
        return (data.columns.prompt,)
    return QUERIES["prompt"] if data.task == "segmentation" else PICTURES["prompt"]


def _known(row: Mapping[str, Any], data: DataConfig, canonical: bool) -> dict[str, list[str]]:
    """Returns the names, in lower case, of columns that may hold each field of this row."""
    values = {name.lower(): value for name, value in row.items()}
    if data.task == "segmentation":
        known = {field: list(columns) for field, columns in QUERIES.items()}
    elif canonical and "prompt" in row and (data.task != "i2i" or "source_image" in row):
        known = {field: [columns[0]] for field, columns in PICTURES.items()}
        known["source"] += [name for name in ("source_images", "sources") if _is_image(values.get(name))]
    else:
        always = {"source_image", "target_image", "file_name", *(["video"] if data.frames else [])}
        # A column "source" may also say where a picture comes from.
        known = {
            field: [name for name in columns if name in always or _is_image(values.get(name))]
            for field, columns in PICTURES.items()
        }
        # The hub's image folders have their captions in "text", and may have another column "prompt".
        known["prompt"] = [*(["text"] if "file_name" in row else []), *PICTURES["prompt"]]
    # The very picture comes before the name of a file that it had.
    return {
        field: sorted(columns, key=lambda name: not isinstance(values.get(name), EmbeddedImage))
        for field, columns in known.items()
    }


def _take_sources(columns: _Row, known: Iterable[str], data: DataConfig, canonical: bool) -> Any:
    """Takes a column of sources, or several, of which the last may be empty."""
    several = data.columns.source or _numbered_sources(columns.left, data, canonical)
    if len(several) < 2:
        return columns.take("source", known, *several)
    taken = [columns.take("source", [], name) for name in several]
    images = [image for image in taken if image is not None]
    if None in taken[: len(images)]:
        remedy = "Add it, or name the columns of sources with data.columns.source"
        raise Rejected("missing_source", f"{several[taken.index(None)]} is empty before a later source", remedy)
    return images or None


def _numbered_sources(row: Mapping[str, Any], data: DataConfig, canonical: bool) -> list[str]:
    """Returns columns of pictures with one known name for a source and numbers, in their order, such as
    ``control_path_0`` and ``control_path_1``; the one without a number is the first."""
    known = {} if data.task == "segmentation" else dict.fromkeys(PICTURES["source"][: 1 if canonical else None])
    found: dict[str, list[tuple[int, str]]] = {}
    for name, value in row.items():
        base, number = _NUMBERED.fullmatch(name.lower()).groups()  # type: ignore[union-attr]
        if base in known and (value is None or _is_image(value)):
            found.setdefault(base, []).append((int(number or -1), name))
    series = [columns for columns in found.values() if max(columns)[0] >= 0]
    return [name for _, name in sorted(series[0])] if series else []


def _might_be_meant(unused: Sequence[str], source: Any, target: Any, data: DataConfig) -> bool:
    """Tells whether pictures that nothing reads may be what the task needs.

    An edit's prompt may speak of any, unless its sources have been named by hand. Thumbnails and depths lie next to
    other targets, where only a second target counts.
    """
    if target is None or (source is None and data.task != "t2i"):
        return True
    if data.task in ("i2i", "mixed"):
        return not data.columns.source
    return data.task == "t2i" and not {name.lower() for name in unused}.isdisjoint(PICTURES["target"])


def _not_used(unused: list[str], source: Any, target: Any, columns: _Row, place: Place, data: DataConfig) -> str:
    """Says which columns of pictures are not used, and how to name them."""
    name = unused[0] if len(unused) == 1 else "NAME"
    lacks = ""
    field = "target" if data.task == "t2i" or (target is None and source is not None) else "source"
    if (target if field == "target" else source) is None:
        is_query = data.task == "segmentation"
        sources, targets = ("image", "mask") if is_query else ("picture to edit", "target picture")
        kind = sources if field == "source" else targets
        known = ", ".join((QUERIES if is_query else PICTURES)[field])
        lacks = f", and there is no {kind}. Columns known for the {kind}: {known}"
    elif field == "source":
        name = f"[{','.join([*(column for column, became in columns.became.items() if became == field), *unused])}]"
    found = ", ".join(f"{name} ({columns.became.get(name, 'not used')})" for name in (*columns.became, *columns.left))
    return (
        f"{place}: nothing reads the pictures in the column {', '.join(unused)}{lacks}. Columns found: {found}. Say"
        f" what to read with data.columns.{field}={name}, or what is not wanted with"
        f" data.columns.ignored=[{','.join(unused)}]."
    )


def _take_prompts_of_mask(columns: _Row, mask: Any, record_id: Any, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Returns the mask, and ``box`` and ``points`` where the row has them."""
    box = columns.take("box", ("box", "bbox"))
    solution_box, solution_points = parse_solution(columns.take("box and points", ("solution",)))
    if isinstance(mask, list) and not _is_image(mask):
        mask = mask_image(mask, "the mask")
    if mask is None and solution_box is not None and record_id is not None:
        # Seg-Zero's masks lie next to the tables or, for tables in ``data``, next to that folder.
        parent = "../" if folder.name == "data" and (folder / "../masks").is_dir() else ""
        mask = f"{parent}masks/{record_id}.png"
    box = solution_box if box is None else box
    points = columns.take("points", ("points",))
    points = solution_points if points is None else points
    return mask, {name: value for name, value in (("box", box), ("points", points)) if value is not None}


def _is_image(value: Any) -> bool:
    """True for an embedded image, and for text that looks like the name of one."""
    if isinstance(value, list) and value:
        return all(map(_is_image, value))
    return isinstance(value, EmbeddedImage | Path) or (isinstance(value, str) and is_image_name(value))


def _is_there(value: Any, folder: Path) -> bool:
    """True for an image that can be read: bytes may be anything, and a name a URL or where the picture came from."""
    if isinstance(value, list):
        return bool(value) and all(_is_there(one, folder) for one in value)
    try:
        if isinstance(value, EmbeddedImage):
            return bool(read_size(value.open()))
        return _is_image(value) and (not isinstance(value, str) or find_file(folder, value) is not None)
    except (ImageError, OSError):
        return False


def _json_value(value: Any) -> Any:
    """Returns the value as JSON holds it, ``...`` for one that it cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, date | time | timedelta | Decimal | UUID):
        return str(value)
    if isinstance(value, Mapping):
        values = {str(key): _json_value(one) for key, one in value.items()}
        return ... if ... in values.values() else values
    if isinstance(value, list | tuple):
        items = [_json_value(one) for one in value]
        return ... if ... in items else items
    return value if value is None or isinstance(value, str | int) else ...
