"""Checks whether a record is usable, without opening its images or leaving the data's folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from visual_grpo.config import Task
from visual_grpo.errors import nearest
from visual_grpo.records.columns import KEYS, QUERY_KEYS
from visual_grpo.records.detect import Found
from visual_grpo.records.guard import Guard
from visual_grpo.records.on_disk import DiskCounter
from visual_grpo.records.raw import EmbeddedImage, Item, Note, Original, RawRecord, Rejected, shorten, wrong_type
from visual_grpo.records.split import held_out_by
from visual_grpo.records.text import check_control_characters, check_utf8
from visual_grpo.types import PromptRecord

_LONGEST_PROMPT = 20_000
"""Characters: some times what the longest text encoder reads."""
_ALIKE = 0.8
"""Similarity of two keys from which one may be a misspelling of the other."""
_LONGEST_KEY = 50
"""Characters; a longer key resembles none, and comparing it would take long."""


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
    _refuse_misspelt(raw, (*KEYS, *QUERY_KEYS) if is_query else KEYS)
    sources = raw.source_images if isinstance(raw.source_images, list) else [raw.source_images]
    record = replace(
        raw,
        prompt=_prompt(raw, prompt),
        id=_label(raw.id, "id"),
        source_images=tuple(
            _image(raw, source, value, "missing_source", guard) for value in sources if raw.source_images is not None
        ),
        target_image=None
        if raw.target_image is None
        else _image(raw, target, raw.target_image, f"missing_{'mask' if is_query else 'target'}", guard),
        group=None if raw.group is None else _label(raw.group, "group"),
        metadata=_metadata(raw),
    )
    _check_task(record, task)
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


def group_key(record: RawRecord, source_sha256: Sequence[str], task: Task) -> str:
    """Records that share it are held out together; ``source_sha256`` are of the original source images."""
    # Queries about one image are held out together, whatever they ask.
    prompt = None if task == "segmentation" else record.prompt
    return held_out_by(prompt, record.group, source_sha256)


def _check_task(record: RawRecord, task: Task) -> None:
    sources = len(record.source_images)
    if task == "t2i" and sources:
        message = "source_image is given, but data.task is t2i"
        raise Rejected("unexpected_source", message, "Set data.task to i2i or mixed, or leave source_image out")
    if task == "i2i" and not sources:
        message = "there is no source_image, and data.task is i2i"
        raise Rejected("missing_source", message, "Add the image to edit, or set data.task to mixed or t2i")
    if task != "segmentation":
        return
    if not sources:
        message = "there is no image, and data.task is segmentation"
        raise Rejected("missing_source", message, "Name the image that the query asks about (key image)")
    if sources > 1:
        message = f"there are {sources} images, and data.task is segmentation: a query asks about one"
        raise Rejected("several_sources", message, "Make one record per image, or remove the other images")
    if record.target_image is None:
        remedy = "Name the mask of the queried object (key mask): an image that is bright inside the object"
        raise Rejected("missing_mask", "there is no mask, and data.task is segmentation", remedy)


def _prompt(raw: RawRecord, key: str) -> str:
    value = raw.prompt
    if value is None:
        known = f"; the record has {shorten(', '.join(map(repr, raw.extra)))}" if raw.extra else ""
        raise Rejected("empty_prompt", f"there is no {key}{known}", f"Add it as {key}, or remove the record")
    if not isinstance(value, str):
        raise wrong_type(key, "text", value)
    check_utf8(value, f"the {key}")
    if not value.strip():
        raise Rejected("empty_prompt", f"the {key} is empty", "Write one or remove the record")
    if len(value) > _LONGEST_PROMPT:
        message = f"the {key} has {len(value):,} characters, more than {_LONGEST_PROMPT:,}"
        raise Rejected("prompt_too_long", message, "Shorten it: memory grows with its length")
    check_control_characters(value.strip(), f"the {key}")
    return value.strip()


def _label(value: Any, key: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise wrong_type(key, "text or a whole number", value)
    check_utf8(str(value), f"the {key}")
    return str(value).strip() if key == "id" else str(value)


def _image(raw: RawRecord, key: str, value: Any, missing: str, guard: Guard) -> Original:
    if isinstance(value, EmbeddedImage | Path):
        return value
    if not isinstance(value, str) or not value:
        raise wrong_type(key, "the path of an image", value)
    path, name = raw.folder / value, f"{key} {shorten(value)!r}"
    guard.check(path, name)
    try:
        exists = path.is_file()
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise Rejected(missing, f"{name} cannot be opened ({error.strerror})", "Correct the path") from error
    if not exists:
        message = f"{name} does not exist (looked for {path})"
        raise Rejected(missing, message, _path_hint(value) or "Correct the path or add the file")
    return path


def _path_hint(value: str) -> str | None:
    if "://" in value:
        return "Download the image and give its path; URLs are not fetched"
    if value.startswith("~"):
        return "Write the path from the data's folder; ~ is not expanded"
    if "\\" in value:
        return "Write the path with / instead of \\"
    return None


def _metadata(raw: RawRecord) -> str:
    value = {} if raw.metadata is None else raw.metadata
    if not isinstance(value, Mapping):
        raise wrong_type("metadata", "a JSON object", value)
    try:
        text = json.dumps({**raw.extra, **value}, ensure_ascii=False, sort_keys=True)
    except RecursionError as error:
        raise Rejected(
            "too_deep", "objects and lists are too deep inside each other", "Use a flatter record"
        ) from error
    check_utf8(text, "the metadata")
    return text


def _refuse_misspelt(raw: RawRecord, known: tuple[str, ...]) -> None:
    """Rejects a key that looks like a known one which is missing: without its target, it would train as another."""
    given = {
        **dict.fromkeys(("prompt", "query", "problem"), raw.prompt),
        **dict.fromkeys(("target_image", "mask"), raw.target_image),
        **dict.fromkeys(("source_image", "image"), raw.source_images),
        "group": raw.group,
        "metadata": raw.metadata,
        **raw.extra,
    }
    for key in raw.extra:
        meant = _meant(key, known) if len(key) <= _LONGEST_KEY and key not in known else None
        if meant is not None and given.get(meant) is None:
            raise Rejected("unknown_key", f"there is no field {shorten(key)!r}. Did you mean {meant!r}?", "Rename it")


@lru_cache(maxsize=4096)
def _meant(key: str, known: tuple[str, ...]) -> str | None:
    """The known key that ``key`` is a misspelling of, or another spelling: ``source-image``, ``targetImage``."""
    if not key[:1].isalnum():  # People comment a key out with a sign.
        return None
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[\W_]+", " ", key).lower().split()
    meant = nearest("_".join(words), known, cutoff=_ALIKE)
    # One more word, as in prompt_zh, makes another name. Nearly all short words resemble id.
    if meant is not None and meant != "id" and len(words) in (1, len(meant.split("_"))):
        return meant
    return next((key for key in known if key.replace("_", "") == "".join(words)), None)


def _path(image: Original) -> Path:
    """Returns only a name for an image in a table."""
    return image if isinstance(image, Path) else Path(image.name)
