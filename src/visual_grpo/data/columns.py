"""Turns a table's row into a record: which column holds what, by the names that datasets use or ``data.columns``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.config import DataConfig
from visual_grpo.config.data import ColumnsConfig
from visual_grpo.data.media import each, from_json, held, is_page, is_there, is_url, is_video
from visual_grpo.data.queries import mask_image, parse_solution
from visual_grpo.data.record import EmbeddedImage, Place, Record, Rejected, shorten

PICTURES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "text", "caption", "instruction", "edit_prompt", "edit", "txt"),
    "source": (
        *("source_image", "source_images", "sources", "source", "source_img", "input_image", "input_images"),
        *("original_image", "edit_image", "control_path", "control_image", "control_file_path"),
    ),
    "target": (
        *("target_image", "target", "target_img", "edited_image", "output_image", "file_name", "image", "image_path"),
        *("img", "png", "jpg", "jpeg", "webp"),
        *("video", "videos", "video_path", "media_path", "file_path", "mp4", "webm", "mov", "avi", "mkv", "image_url"),
    ),
}
"""Field -> columns in datasets of pictures and edits, such as InstructPix2Pix's, MagicBrush's, the hub's image folders,
webdataset, and the lists of other trainers (musubi-tuner's video_path, LTX's media_path, VideoX-Fun's file_path,
LLaMA-Factory's videos). The first is the key of ``records.jsonl``. A source may be a list of images, or several columns
whose names end with a number: ``control_path_0``, ``control_path_1``."""
_OF_VIDEOS = ("image", "image_path", "img")
"""Columns known for the target, which hold the picture that a video begins with where the row also has the video."""
_MAY_BE_TEXT = frozenset({"sources", "source", "target", "file_path", "image_url", "webp", "jpg", "jpeg", "png"}) | {
    *("video", "videos", "mp4", "webm", "mov", "avi", "mkv")
}
"""Known columns that are also called so where they hold no pictures: "source" may say where one comes from."""
QUERIES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "query", "problem", "text", "caption", "expression"),
    "source": ("source_image", "image", "file_name", "image_path"),
    "target": ("target_image", "mask", "mask_path"),
}
"""Field -> columns in queries about an image, as in Seg-Zero's datasets (arXiv 2503.06520)."""
_SAYS_PICTURE = re.compile("image|img|picture|photo|video|clip|target|control|mask|depth|thumbnail", re.IGNORECASE)
"""Matches names of columns whose URLs lead to pictures, whatever the URLs end in."""
IGNORED, METADATA, EMPTY, REJECTED = "ignored", "metadata", "empty", "rejected with its row"
NOT_FETCHED, NO_FILE = "metadata (URLs, which are not fetched)", "metadata (files that do not exist)"
"""Outcomes for a column of pictures that cannot be read."""
INFINITE, PARTLY = "metadata (an infinite number becomes null)", "metadata (without what JSON cannot hold)"
_FOLDERS = ("images", "videos")
"""Folders next to a table that its paths may be relative to, too, as Flow-Factory has them (guidance/datasets.md)."""
_NUMBERED = re.compile(r"(.*?)_?(\d*)", re.DOTALL)
"""A column's name, and the number at its end."""


class _Row:
    """The columns of a row that are left, and what the used ones became."""

    def __init__(self, row: Mapping[str, Any], place: Place, folder: Path, columns: ColumnsConfig) -> None:
        self._named, self._folder = columns.named(), folder
        self.became = {name: IGNORED for name in columns.ignored if name in row}
        self.left = {name: value for name, value in row.items() if name not in self.became}
        self.pictures = {
            name: pictures
            for name, value in self.left.items()
            if (pictures := held(value, f"{place}, column {name}")) is not None
            and (name in self._named or _says_picture(name) or not all(map(is_page, each(pictures))))
        }
        """Column -> the pictures and videos that it holds (`media.held`); links to pages do not count."""

    def take(self, field: str, known: Iterable[str], named: str | None = None) -> Any:
        """Takes the column ``named`` by hand, else the first of the ``known`` ones with a value, or the first.

        A column that is named by hand serves no other field. Names match case-insensitively if there is no exact match.
        """
        return None if (name := self._found(known, named)) is None else self._taken(name, field)

    def take_picture(self, field: str, known: Iterable[str], named: str | None = None) -> Any:
        """Takes a column like `take`: its pictures, else its value, which a cell of CSV may hold as JSON."""
        if (name := self._found(known, named)) is None:
            return None
        value = self._taken(name, field)
        return None if value == "" else _located(self.pictures.get(name, from_json(value)), self._folder)

    def _found(self, known: Iterable[str], named: str | None) -> str | None:
        free = [name for name in self.left if name not in self._named]
        spelt = {name.lower(): name for name in free} | {name: name for name in free}
        names = (spelt.get(name) for name in known) if named is None else [named]
        present = [name for name in names if name in self.left]
        return min(present, key=lambda name: self.left[name] in (None, ""), default=None)

    def _taken(self, name: str, field: str) -> Any:
        self.became[name] = field
        return self.left.pop(name)

    def unread(self, used: Iterable[Any]) -> dict[str, list[Any]]:
        """Returns the columns that are left with pictures and videos that can be read and are not among the used."""
        located = {name: _located(self.pictures.get(name), self._folder) for name in self.left}
        found = {name: [one for one in each(ones) if one not in used] for name, ones in located.items()}
        return {name: there for name, ones in found.items() if (there := [*filter(self._is_there, ones)])}

    def _is_there(self, picture: Any) -> bool:
        return is_there(picture, self._folder)

    def rest(self) -> dict[str, Any]:
        """Takes the other columns, as metadata if JSON can hold them."""
        kept = {name: value for name, one in self.left.items() if (value := _json_value(one)) is not ...}
        for name, value in self.left.items():
            if value is None:
                self.became[name] = EMPTY
            else:
                self.became[name] = self._kept_as(name, value) if name in kept else IGNORED
        return kept

    def _kept_as(self, name: str, value: Any) -> str:
        pictures = self.pictures.get(name)
        if any(map(is_url, each(pictures))):
            return NOT_FETCHED
        if not all(map(self._is_there, each(pictures))):
            return NO_FILE
        return INFINITE if _has_infinity(value) else METADATA

    def take_metadata(self, known: Iterable[str]) -> Any:
        """Takes the object with metadata, without the values that JSON cannot hold, such as bytes."""
        if (name := self._found(known, None)) is None:
            return None
        value = self._taken(name, METADATA)
        if not isinstance(value, Mapping):
            return value
        kept = {str(key): one for key, given in value.items() if (one := _json_value(given)) is not ...}
        if len(kept) < len(value):
            self.became[name] = PARTLY
        elif _has_infinity(value):
            self.became[name] = INFINITE
        return kept


def _located(pictures: Any, folder: Path) -> Any:
    """Returns `held` pictures with the paths of those that are not in ``folder``, but in one of `_FOLDERS` there."""
    if isinstance(pictures, list):
        return [_located(one, folder) for one in pictures]
    if not isinstance(pictures, str) or is_url(pictures) or is_there(pictures, folder):
        return pictures
    below = (f"{name}/{pictures}" for name in _FOLDERS)
    return next((path for path in below if is_there(path, folder)), pictures)


def _says_picture(name: str) -> bool:
    known = (*PICTURES["source"], *PICTURES["target"])
    return name.lower() in known or _SAYS_PICTURE.search(name) is not None


def record_from_row(
    row: Mapping[str, Any], place: Place, folder: Path, data: DataConfig, *, canonical: bool = False
) -> Record | Rejected:
    """Returns the record of a row, whose paths are relative to ``folder``, or its rejection.

    In a ``canonical`` row, one of records.jsonl, with a ``prompt`` only the first names of `PICTURES` are fields.
    Raises UserError for a column of pictures or videos that is not used and might be meant (`_might_be_meant`).
    """
    columns, by_hand = _Row(row, place, folder, data.columns), data.columns
    known = _known(columns, data, canonical)
    record_id, group = columns.take("id", ["id"]), columns.take("group", ["group"])
    try:
        if missing := [name for name in by_hand.named() if name not in row]:
            message = (
                f"the column {missing[0]!r} of data.columns does not exist; the columns are {shorten(', '.join(row))}"
            )
            raise Rejected("missing_column", message, f"Correct data.columns.{nearest_hint(missing[0], row)}")
        prompt = columns.take("prompt", known["prompt"], by_hand.prompt)
        target = columns.take_picture("target", known["target"], by_hand.target)
        source = _take_sources(columns, known["source"], data, canonical)
        prompts_of_mask: dict[str, Any] = {}
        if data.task == "segmentation":
            target, prompts_of_mask = _take_prompts_of_mask(columns, target, record_id, folder)
    except Rejected as rejected:
        return replace(rejected.at(place, record_id), columns=dict.fromkeys(row, REJECTED))
    is_object = canonical or isinstance(columns.left.get("metadata"), Mapping)
    metadata = columns.take_metadata(["metadata"] if is_object else [])
    unread = columns.unread([*each(target), *each(source)])
    if unread and _might_be_meant(unread, source, target, data):
        raise UserError(_not_used(unread, source, target, columns, place, data))
    extra = columns.rest() | prompts_of_mask
    return Record(
        place=place,
        folder=folder,
        id=record_id,
        prompt=prompt,
        source_images=source,
        target_image=target[0] if isinstance(target, list) and len(target) == 1 else target,
        group=group,
        metadata=metadata,
        extra=extra,
        found=row.keys(),
        columns=columns.became,
    )


def prompt_columns(data: DataConfig) -> tuple[str, ...]:
    if data.columns.prompt is not None:
        return (data.columns.prompt,)
    return QUERIES["prompt"] if data.task == "segmentation" else PICTURES["prompt"]


def _known(row: _Row, data: DataConfig, canonical: bool) -> dict[str, list[str]]:
    """Returns the names, in lower case, of columns that may hold each field of this row."""
    values, pictures = ({name.lower(): one for name, one in ones.items()} for ones in (row.left, row.pictures))
    if data.task == "segmentation":
        known = {field: list(columns) for field, columns in QUERIES.items()}
    elif canonical and "prompt" in row.left and (data.task != "i2i" or "source_image" in row.left):
        known = {field: [columns[0]] for field, columns in PICTURES.items()}
        known["source"] += [name for name in ("source_images", "sources") if name in pictures]
    else:
        text = _MAY_BE_TEXT - ({"video", "videos"} if data.frames else set())
        known = {
            field: [name for name in columns if name not in text or name in pictures]
            for field, columns in PICTURES.items()
        }
        # The hub's image folders have their captions in "text", and may have another column "prompt".
        known["prompt"] = [*(["text"] if "file_name" in values else []), *PICTURES["prompt"]]
        with_video = data.frames is not None and any(is_video(pictures.get(name)) for name in known["target"])
        if with_video and data.task != "t2i":
            known["source"] += _OF_VIDEOS

    def is_later(name: str) -> tuple[bool, bool]:
        """The video comes before a picture of it, and the very picture before the name of a file that it had."""
        first = next(each(pictures.get(name)), None)
        return data.frames is not None and not is_video(first), not isinstance(first, EmbeddedImage)

    known["source"].sort(key=lambda name: is_later(name)[1])
    known["target"].sort(key=is_later)
    return known


def _take_sources(columns: _Row, known: Iterable[str], data: DataConfig, canonical: bool) -> Any:
    """Takes a column of sources, or several, of which the last may be empty."""
    several = data.columns.source or _numbered_sources(columns, data, canonical)
    if len(several) < 2:
        return columns.take_picture("source", known, *several)
    taken = [columns.take_picture("source", [], name) for name in several]
    images = [image for image in taken if image is not None]
    if None in taken[: len(images)]:
        remedy = "Add it, or name the columns of sources with data.columns.source"
        raise Rejected("missing_source", f"{several[taken.index(None)]} is empty before a later source", remedy)
    return images or None


def _numbered_sources(row: _Row, data: DataConfig, canonical: bool) -> list[str]:
    """Returns columns of pictures with one known name for a source and numbers, in their order, such as
    ``control_path_0`` and ``control_path_1``; the one without a number is the first."""
    known = {} if data.task == "segmentation" else dict.fromkeys(PICTURES["source"][: 1 if canonical else None])
    found: dict[str, list[tuple[int, str]]] = {}
    for name, value in row.left.items():
        base, number = _NUMBERED.fullmatch(name.lower()).groups()  # type: ignore[union-attr]
        if base in known and (value is None or name in row.pictures):
            found.setdefault(base, []).append((int(number or -1), name))
    series = [columns for columns in found.values() if max(columns)[0] >= 0]
    return [name for _, name in sorted(series[0])] if series else []


def _might_be_meant(unread: Mapping[str, Sequence[Any]], source: Any, target: Any, data: DataConfig) -> bool:
    """Tells whether pictures that nothing reads may be what the task needs.

    An edit's prompt may speak of any, unless its sources have been named by hand. Thumbnails and depths lie next to
    other targets, where only a second target counts: a video, where targets are videos, else a picture.
    """
    if target is None or (source is None and data.task != "t2i"):
        return True
    if data.task in ("i2i", "mixed"):
        return not data.columns.source
    kind = data.frames is not None
    same = (name for name, ones in unread.items() if any(is_video(one) == kind for one in ones))
    return data.task == "t2i" and any(name.lower() in PICTURES["target"] for name in same)


def _not_used(
    unread: Mapping[str, Sequence[Any]], source: Any, target: Any, columns: _Row, place: Place, data: DataConfig
) -> str:
    """Says which columns of pictures are not used, and how to name them."""
    unused = list(unread)
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
    kinds = {is_video(one) for ones in unread.values() for one in ones}
    what = " and ".join(text for text, kind in (("pictures", False), ("videos", True)) if kind in kinds)
    hint = " Videos are read where data.frames says how many frames they have." * (True in kinds and not data.frames)
    hint += " The picture to edit cannot be a video." * (True in kinds and field == "source")
    return (
        f"{place}: nothing reads the {what} in the column{'s' * (len(unused) > 1)} {', '.join(unused)}{lacks}. Columns"
        f" found: {found}. Say what to read with data.columns.{field}={name}, or what is not wanted with"
        f" data.columns.ignored=[{','.join(unused)}].{hint}"
    )


def _take_prompts_of_mask(columns: _Row, mask: Any, record_id: Any, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Returns the mask, and ``box`` and ``points`` where the row has them."""
    box = from_json(columns.take("box", ("box", "bbox")))
    solution_box, solution_points = parse_solution(columns.take("box and points", ("solution",)))
    if isinstance(mask, list) and all(isinstance(row, list | tuple) for row in mask):
        mask = mask_image(mask, "the mask")
    if mask is None and solution_box is not None and record_id is not None:
        # Seg-Zero's masks lie next to the tables or, for tables in ``data``, next to that folder.
        parent = "../" if folder.name == "data" and (folder / "../masks").is_dir() else ""
        mask = f"{parent}masks/{record_id}.png"
    box = solution_box if box is None else box
    points = from_json(columns.take("points", ("points",)))
    points = solution_points if points is None else points
    return mask, {name: value for name, value in (("box", box), ("points", points)) if value is not None}


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


def _has_infinity(value: Any) -> bool:
    if isinstance(value, Mapping | list | tuple):
        return any(map(_has_infinity, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, float) and math.isinf(value)
