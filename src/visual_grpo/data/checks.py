"""Checks whether a record is usable, without opening its images or leaving the data's folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from visual_grpo.common.errors import nearest
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import Task
from visual_grpo.data.columns import KEYS, QUERY_KEYS
from visual_grpo.data.detect import Found
from visual_grpo.data.guard import Guard
from visual_grpo.data.raw import EmbeddedImage, Item, Note, Original, RawRecord, Rejected, shorten, wrong_type
from visual_grpo.data.report import DiskCounter
from visual_grpo.data.split import held_out_by

_LONGEST_PROMPT = 20_000
"""Characters: some times what the longest text encoder reads."""

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202d\u202e]")
"""Control characters other than tab and line breaks, and overrides of the writing direction: with one, a prompt shows
another text than the model reads."""


def survey(found: Found, task: Task) -> Iterator[RawRecord | Rejected]:
    """The records that the preparation will accept, unless an image of theirs is damaged, and those it will reject."""
    for item in with_ids(found.items(task)):
        if isinstance(item, RawRecord):
            try:
                yield checked(item, task, found.guard)
            except Rejected as rejected:
                yield rejected.at(item.place, item.shown_id)
        elif not isinstance(item, Note):
            yield item


def with_ids(items: Iterator[Item]) -> Iterator[Item]:
    """Yields the items; a record without an id gets a hash of its folder, prompt and images, and of the number of
    identical records before it: adding or reordering other records does not move it to another split."""
    with DiskCounter() as seen:
        for item in items:
            if isinstance(item, RawRecord) and item.id is None:
                prompt = item.prompt.strip() if isinstance(item.prompt, str) else item.prompt
                parts = (PurePosixPath(item.place.file).parent, prompt, item.target_image, item.source_images)
                content = "\0".join(map(str, parts))
                digest = hashlib.sha256(f"{content}\0{seen.add(content)}".encode("utf-8", "surrogatepass"))
                item = replace(item, id=digest.hexdigest()[:16])
            yield item


def checked(raw: RawRecord, task: Task, guard: Guard) -> RawRecord:
    """The record with values of the right types and images that exist.

    Raises:
        Rejected: at the first value that is invalid or does not suit the task.
    """
    is_query = task == "segmentation"
    prompt, source, target = ("query", "image", "mask") if is_query else ("prompt", "source_image", "target_image")
    _refuse_misspelt(raw, is_query)
    given = [] if raw.source_images is None else raw.source_images
    images = given if isinstance(given, list) else [given]
    record = replace(
        raw,
        prompt=_prompt(raw, prompt),
        id=_label(raw.id, "id").strip(),
        source_images=tuple(_image(raw, source, "source", image, guard) for image in images),
        target_image=None
        if raw.target_image is None
        else _image(raw, target, target.removesuffix("_image"), raw.target_image, guard),
        group=None if raw.group is None else _label(raw.group, "group"),
        metadata=_metadata(raw),
    )
    _check_task(task, record)
    return record


def as_prompt(record: RawRecord, task: Task) -> PromptRecord:
    """Returns a checked record as rewards will see it, with its original images."""
    made = dict.fromkeys(("box", "points")) if task == "segmentation" else {}
    return PromptRecord(
        id=record.id,
        prompt=record.prompt,
        target_image=None if record.target_image is None else _path(record.target_image),
        source_images=tuple(map(_path, record.source_images)),
        metadata=made | json.loads(record.metadata),
    )


def _path(image: Original) -> Path:
    return image if isinstance(image, Path) else Path(image.name)


def group_key(record: RawRecord, source_sha256: Sequence[str], task: Task) -> str:
    """Records that share it are held out together; ``source_sha256`` are of the original source images."""
    # Queries about one image are held out together, whatever they ask.
    return held_out_by(None if task == "segmentation" else record.prompt, record.group, source_sha256)


def _check_task(task: Task, record: RawRecord) -> None:
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


def _prompt(raw: RawRecord, key: str) -> str:
    if raw.prompt is None:
        known = f"; the record has {shorten(', '.join(map(repr, raw.extra)))}" if raw.extra else ""
        raise Rejected("empty_prompt", f"there is no {key}{known}", f"Add it as {key}, or remove the record")
    if not isinstance(raw.prompt, str):
        raise wrong_type(key, "text", raw.prompt)
    text = raw.prompt.strip()
    _check_utf8(text, key)
    if not text:
        raise Rejected("empty_prompt", f"the {key} is empty", "Write one or remove the record")
    if len(text) > _LONGEST_PROMPT:
        message = f"the {key} has {len(text):,} characters, more than {_LONGEST_PROMPT:,}"
        raise Rejected("prompt_too_long", message, "Shorten it: memory grows with its length")
    if (control := _CONTROL.search(text)) is not None:
        message = f"the {key} has the control character U+{ord(control[0]):04X} at character {control.start() + 1}"
        raise Rejected("control_character", message, "Remove it; line breaks and tabs may stay")
    return text


def _label(value: Any, key: str) -> str:
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


def _image(raw: RawRecord, key: str, kind: str, value: Any, guard: Guard) -> Original:
    if isinstance(value, EmbeddedImage | Path):
        return value
    if not isinstance(value, str) or not value:
        raise wrong_type(key, "the path of an image", value)
    path, name = raw.folder / value, f"{key} {shorten(value)!r}"
    try:
        guard.check(path, name)
        problem = "" if path.is_file() else f"does not exist or is not an ordinary file (looked for {path})"
    except OSError as error:  # A name that is too long, a folder that may not be entered.
        problem = f"cannot be opened ({error.strerror})"
    if problem:
        remedy = "Correct the path or add the file; URLs are not fetched"
        raise Rejected(f"missing_{kind}", f"{name} {problem}", remedy)
    return path


def _metadata(raw: RawRecord) -> str:
    value = {} if raw.metadata is None else raw.metadata
    if not isinstance(value, Mapping):
        raise wrong_type("metadata", "a JSON object", value)
    text = json.dumps({**raw.extra, **value}, ensure_ascii=False, sort_keys=True)
    _check_utf8(text, "metadata")
    return text


def _refuse_misspelt(raw: RawRecord, is_query: bool) -> None:
    """Rejects a key that looks like a known one which is missing: without its target, it would train as another."""
    given = {
        **dict.fromkeys(("prompt", "query", "problem"), raw.prompt is not None),
        **dict.fromkeys(("target_image", "mask"), raw.target_image is not None),
        **dict.fromkeys(("source_image", "image"), raw.source_images is not None),
        **{name: getattr(raw, name) is not None for name in ("id", "group", "metadata")},
        **{name: raw.extra.get(name) is not None for name in ("box", "bbox", "points")},
    }
    known = (*KEYS, *QUERY_KEYS) if is_query else KEYS
    missing = {name.replace("_", ""): name for name in known if not given[name]}
    for key in raw.extra:
        # People comment a key out with a sign; a number or another language's code makes another name.
        if key[:1].isalpha() and key not in known and len(key) < 20:
            meant = nearest(re.sub(r"[\W_]", "", key).lower(), missing, cutoff=0.83)
            if meant is not None and not key[-1].isdigit():
                hint = f"there is no field {key!r}. Did you mean {missing[meant]!r}?"
                raise Rejected("unknown_key", hint, "Rename it, or begin it with _")
