"""Checks whether a record is usable, without opening its images or leaving the data's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from visual_grpo.config import Task
from visual_grpo.records.aliases import QUERY_KEYS
from visual_grpo.records.control_characters import first_control_character
from visual_grpo.records.guard import ANYWHERE, Guard
from visual_grpo.records.layouts.records_jsonl import KEYS
from visual_grpo.records.misspelt import refuse_misspelt, resembling
from visual_grpo.records.raw import EmbeddedImage, Original, RawRecord, Rejected, shorten, wrong_type
from visual_grpo.records.text import check_utf8


@dataclass(frozen=True, kw_only=True)
class Words:
    """The names of a record's fields in messages; they depend on the task."""

    prompt: str = "prompt"
    source: str = "source_image"
    target: str = "target_image"
    missing_target: str = "missing_target"
    """The reason of rejection if the target does not exist."""
    keys: tuple[str, ...] = KEYS
    """Known keys, suggested for misspelt ones."""


_LONGEST_PROMPT = 20_000
"""Characters: some times what the longest text encoder reads."""

_WORDS = Words()
_QUERY_WORDS = Words(
    prompt="query",
    source="image",
    target="mask",
    missing_target="missing_mask",
    keys=(*KEYS, *QUERY_KEYS),
)


@dataclass(frozen=True, kw_only=True)
class CheckedRecord:
    """A record with values of the correct types and images that exist."""

    id: str
    prompt: str
    target_image: Original | None
    source_images: tuple[Original, ...]
    group: str | None
    """Records of the same group are held out together."""
    metadata: str
    """A JSON object."""
    unknown_keys: tuple[tuple[str, str], ...] = ()
    """Keys that resemble a known key, but are kept as metadata: (key, the hint at the known key)."""


def check(raw: RawRecord, task: Task = "t2i", guard: Guard = ANYWHERE) -> CheckedRecord:
    """Checks a record's values.

    Args:
        task: only determines the field names in messages.
        guard: which files the record may name.

    Raises:
        Rejected: at the first invalid value.
    """
    words = _QUERY_WORDS if task == "segmentation" else _WORDS
    refuse_misspelt(raw.extra, _fields(raw), words.keys)
    sources = _sources(raw.source_images)
    target = None
    if raw.target_image is not None:
        target = _image(raw, words.target, raw.target_image, words.missing_target, guard)
    return CheckedRecord(
        prompt=_prompt(raw, words.prompt),
        id=_id(raw),
        target_image=target,
        source_images=tuple(_image(raw, words.source, source, "missing_source", guard) for source in sources),
        group=_group(raw),
        metadata=_metadata(raw),
        unknown_keys=resembling(raw.extra, words.keys),
    )


def check_task(record: CheckedRecord, task: Task) -> None:
    """Checks that a record suits ``data.task``.

    Raises:
        Rejected: an unexpected or missing source image; for segmentation, not exactly one image or no mask.
    """
    if task == "segmentation":
        _check_query(record)
    if task == "t2i" and record.source_images:
        raise Rejected(
            "unexpected_source",
            "source_image is given, but data.task is t2i",
            "Set data.task to i2i or mixed, or leave source_image out",
        )
    if task == "i2i" and not record.source_images:
        raise Rejected(
            "missing_source",
            "there is no source_image, and data.task is i2i",
            "Add the image to edit, or set data.task to mixed or t2i",
        )


def _check_query(record: CheckedRecord) -> None:
    if not record.source_images:
        raise Rejected(
            "missing_source",
            "there is no image, and data.task is segmentation",
            "Name the image that the query asks about (key image)",
        )
    if len(record.source_images) > 1:
        raise Rejected(
            "several_sources",
            f"there are {len(record.source_images)} images, and data.task is segmentation: a query asks about one",
            "Make one record per image, or remove the other images",
        )
    if record.target_image is None:
        raise Rejected(
            "missing_mask",
            "there is no mask, and data.task is segmentation",
            "Name the mask of the queried object (key mask): an image that is bright inside the object",
        )


def _prompt(raw: RawRecord, key: str) -> str:
    value = raw.prompt
    if value is None:
        known = f"; the record has {shorten(', '.join(map(repr, raw.extra)))}" if raw.extra else ""
        raise Rejected("empty_prompt", f"there is no {key}{known}", "Add one or remove the record")
    if not isinstance(value, str):
        raise wrong_type(key, "text", value)
    check_utf8(value, f"the {key}")
    if not value.strip():
        raise Rejected("empty_prompt", f"the {key} is empty", "Write one or remove the record")
    if len(value) > _LONGEST_PROMPT:
        raise Rejected(
            "prompt_too_long",
            f"the {key} has {len(value):,} characters, more than {_LONGEST_PROMPT:,}",
            "Shorten it: it looks like a whole document, and memory for it grows with its length",
        )
    control = first_control_character(value.strip())
    if control is not None:
        raise Rejected(
            "control_character",
            f"the {key} has {control[1]} at character {control[0] + 1}",
            "Remove it; line breaks and tabs may stay",
        )
    return value.strip()


def _id(raw: RawRecord) -> str:
    value = raw.id
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise wrong_type("id", "text or a whole number", value)
    check_utf8(str(value), "the id")
    if not str(value).strip():
        raise Rejected("wrong_type", "the id is empty", "Write one, or leave it out to have one generated")
    return str(value).strip()


def _group(raw: RawRecord) -> str | None:
    value = raw.group
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise wrong_type("group", "text or a whole number", value)
    check_utf8(str(value), "the group")
    return str(value)


def _sources(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _image(raw: RawRecord, key: str, value: Any, missing: str, guard: Guard) -> Original:
    if isinstance(value, EmbeddedImage):
        return value
    if not isinstance(value, str) or not value:
        raise wrong_type(key, "the path of an image", value)
    path = raw.folder / value
    guard.check(path, f"{key} {shorten(value)!r}")
    try:
        exists = path.is_file()
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise Rejected(
            missing,
            f"{key} {shorten(value)!r} cannot be opened ({error.strerror})",
            "Correct the path",
        ) from error
    if not exists:
        raise Rejected(
            missing,
            f"{key} {shorten(value)!r} does not exist (looked for {path})",
            _path_hint(value) or "Correct the path or add the file",
        )
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
    text = json.dumps({**raw.extra, **value}, ensure_ascii=False, sort_keys=True)
    check_utf8(text, "the metadata")
    return text


def _fields(raw: RawRecord) -> dict[str, Any]:
    """The values that the record has, by every name of their fields."""
    return {
        **dict.fromkeys(("prompt", "query", "problem"), raw.prompt),
        **dict.fromkeys(("target_image", "mask"), raw.target_image),
        **dict.fromkeys(("source_image", "image"), raw.source_images),
        "group": raw.group,
        "metadata": raw.metadata,
        **raw.extra,
    }
