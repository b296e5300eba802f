"""The objects that a record asks for, in its metadata ``objects``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from visual_grpo.errors import UserError, nearest_hint
from visual_grpo.rewards.named_colours import COLOURS
from visual_grpo.types import PromptRecord

POSITIONS = ("left", "right", "top", "bottom", "center")
_KEYS = ("label", "count", "color", "position")


@dataclass(frozen=True)
class Asked:
    """An object, and what is asked of it; None = anything."""

    label: str
    count: int | None = None
    """Exactly so many; None = at least one."""
    color: str | None = None
    position: str | None = None


def asked_objects(record: PromptRecord) -> list[Asked]:
    """Empty if the record has none. Raises UserError, naming the record and the entry, where they are malformed."""
    entries = record.metadata.get("objects")
    if entries is None:
        return []
    if not isinstance(entries, list | tuple) or not entries:
        raise _wrong(record, f"are {entries!r}; expected a list of objects")
    return [_asked(record, entry) for entry in entries]


def _asked(record: PromptRecord, entry: Any) -> Asked:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("label"), str):
        raise _wrong(record, f"have {entry!r}; expected an object with a label")
    if unknown := [key for key in entry if key not in _KEYS]:
        hint = nearest_hint(str(unknown[0]), _KEYS)
        raise _wrong(record, f"have the key {unknown[0]!r}; an object has {', '.join(_KEYS)}.{hint}")
    count = entry.get("count")
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise _wrong(record, f"have the count {count!r}; expected a whole number from 1")
    for key, names in (("color", tuple(COLOURS)), ("position", POSITIONS)):
        if entry.get(key) is not None and entry[key] not in names:
            hint = nearest_hint(str(entry[key]), names)
            raise _wrong(record, f"have the {key} {entry[key]!r}; expected one of {', '.join(names)}.{hint}")
    return Asked(entry["label"], count, entry.get("color"), entry.get("position"))


def _wrong(record: PromptRecord, what: str) -> UserError:
    return UserError(f"record {record.id!r}: its metadata objects {what}")
