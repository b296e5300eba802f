"""Reads records as far as it goes without opening an image."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from visual_grpo.config import Task
from visual_grpo.records.aliases import with_query_names
from visual_grpo.records.guard import Guard
from visual_grpo.records.ids import with_ids
from visual_grpo.records.layouts.detect import Found
from visual_grpo.records.raw import Item, Note, Original, RawRecord, Rejected, Rejection, given_id
from visual_grpo.records.split import held_out_by
from visual_grpo.records.validate import CheckedRecord, check, check_task
from visual_grpo.types import PromptRecord

_MADE_FOR_QUERIES = ("box", "points")
"""What the preparation adds to the metadata of every query."""


def read_items(found: Found, task: Task) -> Iterator[Item]:
    """What the layout holds, with ids, and for queries under the names of a record's fields."""
    items = found.items()
    return with_ids(with_query_names(items) if task == "segmentation" else items)


def checked(raw: RawRecord, task: Task, guard: Guard) -> CheckedRecord:
    """The record with checked values; raises `Rejected` where it cannot be used for the task."""
    record = check(raw, task, guard)
    check_task(record, task)
    return record


def survey(found: Found, task: Task) -> Iterator[CheckedRecord | Rejection]:
    """The records that the preparation will accept, unless an image of theirs is damaged, and those it will reject."""
    for item in read_items(found, task):
        if isinstance(item, RawRecord):
            try:
                yield checked(item, task, found.guard)
            except Rejected as rejected:
                yield rejected.at(item.place, given_id(item))
        elif not isinstance(item, Note):
            yield item


def as_prompt(record: CheckedRecord, task: Task) -> PromptRecord:
    """What rewards will see of a record, with its original images."""
    made = dict.fromkeys(_MADE_FOR_QUERIES) if task == "segmentation" else {}
    return PromptRecord(
        id=record.id,
        prompt=record.prompt,
        target_image=None if record.target_image is None else _path(record.target_image),
        source_images=tuple(map(_path, record.source_images)),
        metadata=made | json.loads(record.metadata),
    )


def group_key(record: CheckedRecord, source_sha256: Sequence[str], task: Task) -> str:
    """Records that share it are held out together; ``source_sha256`` are of the original source images."""
    # Queries about one image are held out together, whatever they ask.
    prompt = None if task == "segmentation" else record.prompt
    return held_out_by(prompt, record.group, source_sha256)


def _path(image: Original) -> Path:
    """Of an image in a table only its name."""
    return image if isinstance(image, Path) else Path(image.name)
