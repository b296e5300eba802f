"""Is a record usable? Everything that can be said without opening its images."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visual_grpo.config import Task
from visual_grpo.records.layouts.records_jsonl import KEYS
from visual_grpo.records.raw import RawRecord, Rejected
from visual_grpo.records.text import check_utf8

_SHOWN = 80
"""Characters of a wrong value that a message shows."""


@dataclass(frozen=True, kw_only=True)
class CheckedRecord:
    """A record with values of the right types and images that exist."""

    id: str
    prompt: str
    target_image: Path | None
    source_images: tuple[Path, ...]
    group: str | None
    """Records of one group are held out together."""
    metadata: str
    """A JSON object."""
    unknown_keys: tuple[tuple[str, str], ...] = ()
    """(key, the known key that was probably meant)."""


def check(raw: RawRecord) -> CheckedRecord:
    """Checks a record's values.

    Raises:
        Rejected: the first thing that is wrong with it.
    """
    target = None if raw.target_image is None else _image(raw, "target_image", raw.target_image)
    return CheckedRecord(
        prompt=_prompt(raw),
        id=_id(raw),
        target_image=target,
        source_images=tuple(_image(raw, "source_image", source) for source in _sources(raw.source_images)),
        group=_group(raw),
        metadata=_metadata(raw),
        unknown_keys=_unknown_keys(raw.extra),
    )


def check_task(record: CheckedRecord, task: Task) -> None:
    """Checks that a record is one of those that ``data.task`` asks for.

    Raises:
        Rejected: it has a source image and should not, or the other way round.
    """
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


def given_id(raw: RawRecord) -> str | None:
    """The id for the report, even of a record that is rejected."""
    return None if raw.id is None else _shorten(str(raw.id))


def _prompt(raw: RawRecord) -> str:
    value = raw.prompt
    if value is None:
        known = f"; the record has {', '.join(map(repr, raw.extra))}" if raw.extra else ""
        raise Rejected("empty_prompt", f"there is no prompt{known}", "Add one or remove the record")
    if not isinstance(value, str):
        raise _wrong_type("prompt", "text", value)
    check_utf8(value, "the prompt")
    if not value.strip():
        raise Rejected("empty_prompt", "the prompt is empty", "Write one or remove the record")
    return value.strip()


def _id(raw: RawRecord) -> str:
    value = raw.id
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _wrong_type("id", "text or a whole number", value)
    check_utf8(str(value), "the id")
    if not str(value).strip():
        raise Rejected("wrong_type", "the id is empty", "Write one, or leave it out to get one made")
    return str(value).strip()


def _group(raw: RawRecord) -> str | None:
    value = raw.group
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise _wrong_type("group", "text or a whole number", value)
    check_utf8(str(value), "the group")
    return str(value)


def _sources(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _image(raw: RawRecord, key: str, value: Any) -> Path:
    if not isinstance(value, str) or not value:
        raise _wrong_type(key, "the path of an image", value)
    path = raw.folder / value
    try:
        exists = path.is_file()
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise Rejected(
            _missing(key),
            f"{key} {_shorten(value)!r} cannot be opened ({error.strerror})",
            "Correct the path",
        ) from error
    if not exists:
        raise Rejected(
            _missing(key),
            f"{key} {_shorten(value)!r} does not exist (looked for {path})",
            _path_hint(value) or "Correct the path or add the file",
        )
    return path


def _missing(key: str) -> str:
    return "missing_target" if key == "target_image" else "missing_source"


def _path_hint(value: str) -> str | None:
    if "://" in value:
        return "Download the image and give its path; addresses are not fetched"
    if value.startswith("~"):
        return "Write the home folder out; ~ is not expanded"
    if "\\" in value:
        return "Write the path with / instead of \\"
    return None


def _metadata(raw: RawRecord) -> str:
    value = {} if raw.metadata is None else raw.metadata
    if not isinstance(value, Mapping):
        raise _wrong_type("metadata", "a JSON object", value)
    text = json.dumps({**raw.extra, **value}, ensure_ascii=False, sort_keys=True)
    check_utf8(text, "the metadata")
    return text


def _unknown_keys(extra: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    matches = ((key, difflib.get_close_matches(key, KEYS, n=1, cutoff=0.8)) for key in extra)
    return tuple((key, match[0]) for key, match in matches if match)


def _wrong_type(key: str, expected: str, value: Any) -> Rejected:
    shown = _shorten(repr(value))
    return Rejected("wrong_type", f"{key} must be {expected}, got {shown}", "Correct the value")


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
