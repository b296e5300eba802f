"""Alternative key names of segmentation records, as in Seg-Zero's datasets (arXiv 2503.06520).

Layouts do not know the task and put unknown keys into ``extra``. For segmentation, the keys below are moved from
``extra`` to the record's fields before ids are made; for other tasks they remain metadata.
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
"""Field of a `RawRecord` -> (its key in records.jsonl, alternative keys)."""

QUERY_KEYS = ("image", "query", "problem", "mask", "box", "bbox", "points")
"""All keys that segmentation accepts in addition to those of records.jsonl."""


def with_query_names(items: Iterable[Item]) -> Iterator[Item]:
    """Yields the items with each record's query, image and mask in the fields for prompt, source and target.

    Box and points stay in ``extra``, as ``box`` and ``points``. A record with different values under two names of
    the same field is rejected.
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
    """The value that is given under one or more of the names; None if it is given under none.

    Raises:
        Rejected: two names have different values.
    """
    given = {name: value for name, value in values.items() if value is not None}
    first, *others = given.items() or [("", None)]
    for name, value in others:
        if value != first[1]:
            raise Rejected(
                "ambiguous_key",
                f"{first[0]} and {name} are both given, and differ",
                "Keep only one of them: they are two names of the same field",
            )
    return first[1]
