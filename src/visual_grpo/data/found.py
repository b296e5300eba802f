"""Lists what a dataset holds, and what became of it: every file, column and split that was given has its line."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from visual_grpo.common.errors import counted
from visual_grpo.data.edit_folders import folder_of
from visual_grpo.data.folders import CAPTIONS
from visual_grpo.data.record import Record, Rejected, find_file, is_image_name, is_system_file, is_video_name
from visual_grpo.data.sources import RecordSource
from visual_grpo.data.splits import split_in_path

UNNAMED = "pictures that no record names"
_MAX_LISTED = 1000
"""Ignored files that are listed one by one; all are counted."""


class Found:
    """Collects the files and columns of the records of one source, also of those in splits that are not read."""

    def __init__(self, source: RecordSource) -> None:
        self._source = source
        self._used: set[str] = set()
        """Files that a record was read from or names, relative to the data's folder."""
        self._other: dict[str, str | None] = {}
        """Files of records in splits that are not read, with the split."""
        self._mentioned: set[str] = set()
        """Those that only a column of metadata names."""
        self._columns: dict[str, Counter[str]] = {}
        """Column -> what it became."""

    def add(self, item: Record | Rejected) -> None:
        files = set(self._files(item))
        if self._source.folder is not None and isinstance(item, Record):
            extra = (value for value in item.extra.values() if isinstance(value, str) and is_image_name(value))
            self._mentioned |= {self._relative(item.folder / value) for value in extra}
        if item.split in self._source.chosen:
            self._used |= files
            for column, became in item.columns.items() if isinstance(item, Record) else ():
                self._columns.setdefault(column, Counter())[became] += 1
        else:
            self._other |= dict.fromkeys(files, item.split)

    def finish(self) -> dict[str, Any]:
        """Returns files, columns and splits as JSON-compatible values; files used and ignored add up to those found."""
        found, used = self._on_disk()
        ignored = sorted(found - used)
        splits, chosen = self._source.splits, self._source.chosen
        return {
            "files": {
                "found": len(found | used),
                "used": len(used),
                "ignored": dict(Counter(map(self._reason, ignored)).most_common()),
                "listed": ignored[:_MAX_LISTED],
            },
            "columns": {column: dict(counts.most_common()) for column, counts in self._columns.items()},
            "found_splits": {str(name): {"records": n, "used": name in chosen} for name, n in splits.items() if name},
        }

    def _on_disk(self) -> tuple[set[str], set[str]]:
        """Returns the files of the folder, and those of them that are used, spelt as on the disk."""
        folder = self._source.folder
        if folder is None:
            return set(), set()
        found, used = set(_walk(folder)), {self._relative(self._source.path)} - {"."}
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
        if not self._source.limits.videos or not file.is_dir():
            return [file]
        return [frame for frame in file.iterdir() if is_image_name(frame.name)]

    def _relative(self, file: Path) -> str:
        return Path(os.path.relpath(file, self._source.folder)).as_posix()

    def _reason(self, name: str) -> str:
        """Says why a file is not used."""
        split = self._other.get(name, split_in_path(name))
        if split is not None and split not in self._source.chosen:
            return f"of the split {split}"
        if is_image_name(name):
            return "pictures that only metadata name" if name in self._mentioned else UNNAMED
        if is_video_name(name):
            return "videos that no record names" + " (data.frames is not set)" * (not self._source.limits.videos)
        kind = PurePosixPath(name).suffix.lower() or "without suffix"
        if self._source.layout == "captions" and name.endswith(CAPTIONS) and folder_of(name) is not None:
            return f"{kind} next to images to edit, not read: a prompt belongs next to the target"
        return f"{kind}, not read as {self._source.layout}"


def _walk(folder: Path) -> Iterator[str]:
    for base, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not is_system_file(name)]
        yield from ((Path(base) / name).relative_to(folder).as_posix() for name in files if not is_system_file(name))


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
