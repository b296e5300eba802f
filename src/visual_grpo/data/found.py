"""Lists what a dataset holds, and what became of it: each file, split and column of the splits read.

A file is used if a record was read from it or names it, and otherwise ignored with a reason. A column became a field or
metadata, or is ignored; `RecordSource.read` refuses a record of which a column has no word.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import Any

from visual_grpo.common.errors import counted
from visual_grpo.data.columns import NO_FILE, NOT_FETCHED
from visual_grpo.data.edit_folders import folder_of
from visual_grpo.data.folders import CAPTIONS
from visual_grpo.data.media import each, held
from visual_grpo.data.record import Record, Rejected, find_file, is_image_name, is_video_name, listed, stem_of
from visual_grpo.data.sources import RecordSource
from visual_grpo.data.splits import split_in_path

CLOSED = "folders that cannot be opened"
_MAX_LISTED = 1000
"""Ignored files that are listed one by one; all are counted."""
_MAX_BESIDE = 10_000
"""Entries next to a single file that are looked at."""


class Found:
    """Collects the columns of the records in the splits of one source that are read, and the files of all records."""

    def __init__(self, source: RecordSource) -> None:
        self._source = source
        self._used: set[str] = set()
        """Files that a record was read from or names, relative to the data's folder."""
        self._other: dict[str, str | None] = {}
        """Files of records in splits that are not read, with the split."""
        self._mentioned: set[str] = set()
        """Files that only a column of metadata names."""
        self._columns: dict[str, Counter[str]] = {}
        """Column -> what it became."""

    def add(self, item: Record | Rejected) -> None:
        files = set(self._files(item))
        if self._source.folder is not None and isinstance(item, Record):
            names = (one for value in item.extra.values() for one in each(held(value, "")) if isinstance(one, str))
            self._mentioned |= {self._relative(item.folder / name) for name in names}
        if item.split in self._source.chosen:
            self._used |= files
            for column, became in item.columns.items():
                self._columns.setdefault(column, Counter())[became] += 1
        else:
            self._other |= dict.fromkeys(files, item.split)

    def finish(self) -> dict[str, Any]:
        """Returns files, columns and splits as JSON-compatible values."""
        found, used = self._on_disk()
        ignored = sorted(found - used)
        reasons = Counter(map(self._reason, ignored))
        splits, chosen = self._source.splits, self._source.chosen
        return {
            "files": {
                "found": len(found | used),
                "used": len(used),
                "ignored": dict(reasons.most_common()),
                "listed": ignored[:_MAX_LISTED],
            },
            "columns": {column: dict(counts.most_common()) for column, counts in self._columns.items()},
            "unread": self._unread(ignored),
            "found_splits": {str(name): {"records": n, "used": name in chosen} for name, n in splits.items() if name},
        }

    def leaves_out(self) -> bool:
        """Returns whether pictures or videos are left that no record has."""
        found, used = self._on_disk()
        return any(self._unread(found - used).values())

    def _unread(self, ignored: Iterable[str]) -> dict[str, list[str]]:
        """Returns pictures and videos that no record has: files, but for those of other splits, folders that
        cannot be opened, and columns."""
        files = [name for name in ignored if not self._of_other_split(name)] if self._source.folder else self._beside()
        return {
            "pictures": sorted(filter(is_image_name, files)),
            "videos": sorted(filter(is_video_name, files)),
            "folders": sorted(name for name in files if name.endswith("/")),
            "columns": [column for column, became in self._columns.items() if {NOT_FETCHED, NO_FILE} & {*became}],
        }

    def _beside(self) -> list[str]:
        """Returns the files next to the single file that is read, also in the folders there."""
        if not self._source.path.is_file():
            return []
        folder = self._source.path.parent
        entries = chain(folder.glob("[!.]*"), folder.glob("[!.]*/[!.]*"))
        return [file.relative_to(folder).as_posix() for file in islice(entries, _MAX_BESIDE) if file.is_file()]

    def _on_disk(self) -> tuple[set[str], set[str]]:
        """Returns the files of the folder, and those of them that are used, spelt as on the disk."""
        folder = self._source.folder
        if folder is None:
            return set(), set()
        found, used = set(listed(folder)), {self._relative(self._source.path)} - {"."}
        for name in self._used:
            if name in found:
                used.add(name)
            elif (file := find_file(folder, name)) is not None:
                used.add(self._relative(file))
        return found, used

    def _files(self, item: Record | Rejected) -> Iterator[str]:
        if self._source.folder is None:
            return
        yield item.place.file
        if isinstance(item, Record):
            names = [name for name in (item.caption, *item.images) if isinstance(name, str)]
            yield from (self._relative(file) for name in names for file in self._parts(item.folder / name))

    def _parts(self, file: Path) -> list[Path]:
        """The file, or the frames of a video that is a folder of pictures."""
        with suppress(OSError):  # The record of a folder that may not be opened, or of too long a name, is rejected.
            if self._source.limits.videos and file.is_dir():
                return [frame for frame in file.iterdir() if is_image_name(frame.name)]
        return [file]

    def _relative(self, file: Path) -> str:
        return Path(os.path.relpath(file, self._source.folder)).as_posix()

    @cached_property
    def _clips(self) -> set[str]:
        return {stem_of(name) for name in self._used if is_video_name(name)}

    def _of_other_split(self, name: str) -> str | None:
        """Returns the split of a file that is not read because of it: records were found in it."""
        split = self._other.get(name, split_in_path(name))
        return split if split in self._source.splits and split not in self._source.chosen else None

    def _reason(self, name: str) -> str:
        if (split := self._of_other_split(name)) is not None:
            return f"of the split {split}"
        if name.endswith("/"):
            return CLOSED
        if is_image_name(name) or is_video_name(name):
            kind = "pictures" if is_image_name(name) else "videos"
            if stem_of(name).rpartition("/")[0] in self._clips:
                return f"{kind} in a folder with the name of a video that is used"
            frames = " (data.frames is not set)" * (kind == "videos" and not self._source.limits.videos)
            return f"{kind} that {'only metadata name' if name in self._mentioned else 'no record names'}{frames}"
        kind = PurePosixPath(name).suffix.lower() or "without suffix"
        if self._source.layout == "captions" and name.endswith(CAPTIONS) and folder_of(name) is not None:
            return f"{kind} next to images to edit, not read: a prompt belongs next to the target"
        if self._source.layout == "captions" and name.endswith(CAPTIONS):
            same = (suffix for suffix in CAPTIONS if f"{name.removesuffix(kind)}{suffix}" in self._used)
            if (read := next(same, None)) is not None:
                return f"{kind}, not read: a {read} of the same name comes first"
        return f"{kind}, not read as {self._source.layout}"


def files_line(files: dict[str, Any]) -> str:
    """Returns ``12 found, 9 used; ignored: 2 of the split test, 1 .md, not read as captions``."""
    ignored = "; ".join(f"{count} {reason}" for reason, count in files["ignored"].items())
    return f"{files['found']} found, {files['used']} used" + (f"; ignored: {ignored}" if ignored else "")


def columns_line(columns: dict[str, dict[str, int]]) -> str:
    """Returns ``text -> prompt, file_name -> target, score -> metadata (8), empty (2)``."""

    def shown(became: dict[str, int]) -> str:
        return ", ".join(f"{what} ({count})" if len(became) > 1 else what for what, count in became.items())

    return ", ".join(f"{name} -> {shown(became)}" for name, became in columns.items())


def splits_line(splits: dict[str, Any]) -> str:
    """Returns ``train: 8 records used; test: 6 records not used``."""
    kinds = {True: "used", False: "not used"}
    return "; ".join(
        f"{name}: {counted(one['records'], 'record')} {kinds[one['used']]}" for name, one in splits.items()
    )
