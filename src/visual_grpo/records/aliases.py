"""The names that the parts of a segmentation record go by, those of Seg-Zero's datasets (arXiv 2503.06520).

Layouts know nothing of tasks: a key that is not their own goes to ``extra``. For segmentation it is taken from
there before ids are made; for other tasks it stays what it was, metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from visual_grpo.records.raw import Item, RawRecord, Rejected, given_id

_FIELDS = {
    "source_images": ("source_image", ("image",)),
    "prompt": ("prompt", ("query", "problem")),
    "target_image": ("target_image", ("mask",)),
}
"""Field of a `RawRecord` -> (its key in records.jsonl, further keys)."""

QUERY_KEYS = ("image", "query", "problem", "mask", "box", "bbox", "points")
"""All keys that segmentation knows beside those of records.jsonl."""


def with_query_names(items: Iterable[Item]) -> Iterator[Item]:
    """Yields the items, every record with its query, image and mask in the fields of prompt, source and target.

    Box and points stay in ``extra``, as ``box`` and ``points``. A record that gives one thing under two names
    and differently is rejected.
    """
    for item in items:
        if not isinstance(item, RawRecord):
            yield item
            continue
        try:
            yield _renamed(item)
        except Rejected as rejected:
            yield rejected.at(item.place, given_id(item))


def _renamed(raw: RawRecord) -> RawRecord:
    extra = dict(raw.extra)
    fields = {
        field: _only({key: getattr(raw, field), **{name: extra.pop(name, None) for name in names}})
        for field, (key, names) in _FIELDS.items()
    }
    box = _only({name: extra.pop(name, None) for name in ("box", "bbox")})
    return replace(raw, **fields, extra=extra if box is None else {**extra, "box": box})


def _only(values: dict[str, Any]) -> Any:
    """The value that is given under one name, or under several alike; None = under none.

    Raises:
        Rejected: two differ.
    """
    given = {name: value for name, value in values.items() if value is not None}
    first, *others = given.items() or [("", None)]
    for name, value in others:
        if value != first[1]:
            raise Rejected(
                "ambiguous_key",
                f"{first[0]} and {name} are both given, and differ",
                "Keep the one that is meant: they are two names of one thing",
            )
    return first[1]
