"""Checks that the values of a record are usable. Nothing here opens an image or leaves the data's folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from visual_grpo.common.errors import nearest
from visual_grpo.common.machine_errors import is_machine_error
from visual_grpo.config import Task
from visual_grpo.data.media import is_url, is_video
from visual_grpo.data.record import (
    INVISIBLE,
    NULLS,
    EmbeddedImage,
    Limits,
    Original,
    Record,
    Rejected,
    find_file,
    shorten,
    wrong_type,
)

_MAX_PROMPT = 20_000
"""Characters: several times what the longest text encoder reads."""
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202d\u202e]")
"""Control characters other than tab and line breaks, and overrides of the writing direction: with one, a prompt shows
a text that differs from what the model reads."""

_AT_THE_ENDS = re.compile(rf"\A[\s{INVISIBLE}]+|(?<![\s{INVISIBLE}])[\s{INVISIBLE}]+\Z")


def checked(record: Record, task: Task, limits: Limits) -> Record:
    """Returns the record with values of the right types and images that exist. Raises Rejected at the first other."""
    is_query = task == "segmentation"
    prompt, source, target = ("query", "image", "mask") if is_query else ("prompt", "source_image", "target_image")
    _reject_misspelt_key(record, is_query)
    images = [] if record.source_images is None else record.source_images
    images = images if isinstance(images, list) else [images]
    valid = replace(
        record,
        prompt=_check_prompt(record, prompt),
        id=_check_label(record.id, "id").strip(),
        source_images=tuple(_check_image(record.folder, source, "source", image, limits) for image in images),
        target_image=None
        if record.target_image is None
        else _check_image(record.folder, target, target.removesuffix("_image"), record.target_image, limits),
        group=None if record.group is None else _check_label(record.group, "group"),
        metadata=_join_metadata(record),
    )
    _check_task(task, valid)
    return valid


def _reject_misspelt_key(record: Record, is_query: bool) -> None:
    """Rejects a key that looks like a misspelt field that the record lacks, which would be used without that field."""
    values = {"prompt": record.prompt, "id": record.id, "target_image": record.target_image}
    values |= {"source_image": record.source_images, "group": record.group, "metadata": record.metadata}
    if is_query:
        values |= {"image": record.source_images, "query": record.prompt, "problem": record.prompt}
        values |= {"mask": record.target_image, **{name: record.extra.get(name) for name in ("box", "bbox", "points")}}
    missing = {name.replace("_", ""): name for name, value in values.items() if value is None}
    for key in record.extra:
        # A leading sign comments a key out; a number or the code of a language makes a different name.
        if key[:1].isalpha() and key not in values and len(key) < 20 and not key[-1].isdigit():
            meant = nearest(re.sub(r"[\W_]", "", key).lower(), missing, cutoff=0.83)
            if meant is not None:
                hint = f"the field {key!r} is unknown. Did you mean {missing[meant]!r}?"
                remedy = f"Rename it, begin it with _, or leave it out with data.columns.ignored=[{key}]"
                raise Rejected("unknown_key", hint, remedy)


def _check_prompt(record: Record, key: str) -> str:
    if record.prompt is None:
        known = f"; the record has {shorten(', '.join(map(repr, record.extra)))}" if record.extra else ""
        raise Rejected(
            "empty_prompt", f"there is no {key}{known}", f"Add it as {key}, or name its column with data.columns.prompt"
        )
    if not isinstance(record.prompt, str):
        raise wrong_type(key, "text", record.prompt)
    text = _AT_THE_ENDS.sub("", record.prompt)
    _check_utf8(text, key)
    if text.lower() in NULLS:
        message = f"the {key} is empty{f' ({text})' * bool(text)}"
        raise Rejected("empty_prompt", message, "Write one or remove the record")
    if len(text) > _MAX_PROMPT:
        message = f"the {key} has {len(text):,} characters, more than {_MAX_PROMPT:,}"
        raise Rejected("prompt_too_long", message, "Shorten it: memory grows with its length")
    _check_control(text, key)
    return text


def _check_label(value: Any, key: str) -> str:
    if isinstance(value, float) and value.is_integer():  # Of a column with gaps, pandas makes floats.
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise wrong_type(key, "text or a whole number", value)
    _check_utf8(str(value), key)
    _check_control(str(value), key)
    return str(value)


def _check_control(text: str, key: str) -> None:
    if (control := _CONTROL.search(text)) is not None:
        message = f"the {key} has the control character U+{ord(control[0]):04X} at character {control.start() + 1}"
        raise Rejected("control_character", message, "Remove it; line breaks and tabs may stay")


def _check_utf8(text: str, key: str) -> None:
    """Rejects bytes that are not UTF-8, which are read as surrogates, and escaped lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"the {key} is not valid UTF-8 at character {error.start + 1}"
        raise Rejected("not_utf8", message, "Save the file as UTF-8") from error


def _check_image(folder: Path, key: str, kind: str, value: Any, limits: Limits) -> Original:
    if isinstance(value, EmbeddedImage):
        limits.check_size(len(value.data), value.name)
        return value
    if isinstance(value, Path):  # Of a dataset of the hub, downloaded.
        limits.check_size(value.stat().st_size, value.name)
        return value
    if not isinstance(value, str) or not value:
        remedy = "Correct the value, or leave the column out with data.columns.ignored"
        raise replace(wrong_type(key, "the path of an image", value), remedy=remedy)
    name = f"{key} {shorten(value)!r}"
    if is_url(value):
        remedy = "Download the file and give its path, or leave the column out with data.columns.ignored"
        raise Rejected(f"missing_{kind}", f"{name} is a URL, and URLs are not fetched", remedy)
    if kind == "source" and is_video(value):
        message, remedy = f"{name} is a video, and a source is a picture", "Give the picture that the video begins with"
        raise Rejected("unexpected_video", message, remedy)
    return _existing(folder, name, kind, value, limits)


def _existing(folder: Path, name: str, kind: str, value: str, limits: Limits) -> Path:
    """Returns the file of a picture or video, or the folder of a video's frames. Raises Rejected for any other path,
    with the reason in ``name``'s terms."""
    path, remedy = folder / value, "Correct the path or add the file"
    try:
        found = path if kind == "target" and limits.videos and path.is_dir() else find_file(folder, value)
        if found is not None:
            for file in [found, *(found.iterdir() if found.is_dir() else ())]:
                limits.check(file, name)
            return found
        path.stat()
        limits.check(path, name)
        problem = f"is not an ordinary file (looked for {path})"
    except FileNotFoundError:
        problem = f"does not exist (looked for {path})"
        if path.is_symlink():
            problem = f"is a link to {path.readlink()}, which does not exist"
        last = PurePosixPath(value.replace("\\", "/")).name
        if last != value and find_file(folder, last) is not None:
            remedy = f"There is {shorten(last)!r} in the folder, to which paths are relative"
    except (OSError, ValueError) as error:  # A name that is too long, a folder that may not be entered.
        if is_machine_error(error):
            raise
        problem = f"cannot be opened ({error.strerror if isinstance(error, OSError) else error})"
    raise Rejected(f"missing_{kind}", f"{name} {problem}", remedy)


def _join_metadata(record: Record) -> str:
    metadata = {} if record.metadata is None else record.metadata
    if not isinstance(metadata, Mapping):
        raise wrong_type("metadata", "a JSON object", metadata)
    for key in sorted(record.extra.keys() & metadata.keys()):
        if record.extra[key] not in (None, metadata[key]):
            found = f"{shorten(repr(record.extra[key]))}, and {shorten(repr(metadata[key]))} in its metadata"
            raise Rejected("ambiguous_key", f"the record's {key} is {found}", "Keep one of them, or rename one")
    text = json.dumps({**record.extra, **metadata}, ensure_ascii=False, sort_keys=True)
    _check_utf8(text, "metadata")
    return text


def _check_task(task: Task, record: Record) -> None:
    sources = len(record.source_images)
    if task == "t2i" and sources:
        first = record.source_images[0]
        name = os.path.relpath(first, record.folder) if isinstance(first, Path) else first.name
        message = f"there is a source image, {name}, but data.task is t2i"
        raise Rejected("unexpected_source", message, "Set data.task to i2i or mixed, or leave the source out")
    if task == "i2i" and not sources:
        message = "there is no source_image, and data.task is i2i"
        if record.columns:
            message += f"; the record has {shorten(', '.join(record.columns))}"
        remedy = "Add the image to edit as source_image of a table, or name its column with data.columns.source"
        raise Rejected("missing_source", message, remedy)
    if task == "segmentation" and sources != 1:
        message = f"a query asks about one image, and the record has {sources}"
        reason = "several_sources" if sources else "missing_source"
        raise Rejected(reason, message, "Name the image that the query asks about (key image)")
    if task == "segmentation" and record.target_image is None:
        remedy = "Name the mask of the queried object (key mask): an image that is bright inside the object"
        raise Rejected("missing_mask", "there is no mask, and data.task is segmentation", remedy)
