"""Makes ids for records without one.

An id is a hash of the record's folder, prompt and images, and of the number of identical records before it.
Adding, removing or reordering other records does not change it, and therefore does not move the record to another
split.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import PurePosixPath

from visual_grpo.records.on_disk import DiskCounter
from visual_grpo.records.raw import Item, RawRecord

_HEX_DIGITS = 16


def with_ids(items: Iterable[Item]) -> Iterator[Item]:
    """Yields the items; records without an id get one."""
    with DiskCounter() as seen:
        for item in items:
            if isinstance(item, RawRecord) and item.id is None:
                content = _content(item)
                digest = hashlib.sha256(f"{content}\0{seen.add(content)}".encode("utf-8", "surrogatepass"))
                yield replace(item, id=digest.hexdigest()[:_HEX_DIGITS])
            else:
                yield item


def _content(raw: RawRecord) -> str:
    prompt = raw.prompt.strip() if isinstance(raw.prompt, str) else raw.prompt
    folder = PurePosixPath(raw.place.file).parent
    return "\0".join(map(str, (folder, prompt, raw.target_image, raw.source_images)))
