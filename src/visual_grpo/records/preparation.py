"""From records as they were found to the manifest: check, prepare the images, split, report.

Memory does not grow with the data: records stream from the reader to the manifest, a few dozen at a time;
the ids seen so far are 16-byte digests in a temporary SQLite file (`on_disk`).
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visual_grpo.config import DataConfig, Task
from visual_grpo.images import pixel_limit
from visual_grpo.records.budget import Budget
from visual_grpo.records.guard import Guard
from visual_grpo.records.image_store import ImageStore, PreparedImage
from visual_grpo.records.layouts.detect import find_records
from visual_grpo.records.manifest import image_paths, write_manifest
from visual_grpo.records.on_disk import DiskCounter
from visual_grpo.records.ordered_map import ordered_map
from visual_grpo.records.queries import prepare_query
from visual_grpo.records.raw import Item, Note, Place, RawRecord, Rejected, Rejection, given_id
from visual_grpo.records.reading import checked, group_key, read_items
from visual_grpo.records.report import Report
from visual_grpo.records.split import SEALED, Splitter
from visual_grpo.records.validate import CheckedRecord

IMAGES = "images"
"""Folder of the prepared images, beside the manifest."""

_MOST_THREADS = 8

Progress = Callable[[int, int], None]
"""Called with (records done, records in total) after every record."""


@dataclass(frozen=True, kw_only=True)
class PreparedRecord:
    """A record whose images are stored."""

    place: Place
    record: CheckedRecord
    target: PreparedImage | None
    sources: tuple[PreparedImage, ...]
    target_file: str | None = None


class Preparation:
    """One dataset on its way to a manifest.

    Args:
        parameter: what names the path, for messages.

    Raises:
        UserError: nothing at ``config.path``, or no layout fits; nothing has been done yet.
    """

    def __init__(self, config: DataConfig, parameter: str = "data.path") -> None:
        self._config = config
        self._found = find_records(Path(config.path), config.layout, Guard.of(config), parameter)
        self._splitter = Splitter(
            eval_share=config.eval_share, held_out_share=config.held_out_share, sealed_share=config.sealed_share
        )

    def write(self, manifest: Path, progress: Progress | None = None) -> None:
        """Prepares every record, replaces the manifest and removes images that it no longer names.

        The old manifest and its images stay until the new one is complete.

        Raises:
            UserError: no usable record, none to train on, or with ``strict`` the first rejected one.
        """
        self.write_draft(manifest, progress)
        remove_unused_images(manifest)

    def write_draft(self, manifest: Path, progress: Progress | None = None) -> None:
        """As `write`, but leaves all other images beside the manifest: an older manifest there may name them."""
        report = Report(strict=self._config.strict)
        guard = self._found.guard
        store = ImageStore(
            folder=manifest.parent / IMAGES,
            height=self._config.height,
            width=self._config.width,
            max_pixels=guard.max_pixels,
            pixels=Budget(guard.max_pixels),
            bytes=Budget(guard.max_file_bytes),
        )
        with DiskCounter() as ids, warnings.catch_warnings(), pixel_limit(guard.max_pixels):
            warnings.filterwarnings("ignore", module=r"PIL\.")  # odd EXIF data and the like do no harm
            records = self._accepted(store, report, ids, progress)
            rows = (self._row(record, report) for record in records)
            write_manifest(manifest, rows, lambda: self._finish(report))

    def count(self) -> int:
        """About how many records there are."""
        return self._found.count()

    def _accepted(
        self, store: ImageStore, report: Report, ids: DiskCounter, progress: Progress | None
    ) -> Iterator[PreparedRecord]:
        """Prepares records in order; those that cannot be used go to the report."""
        total = self.count()
        threads = min(_MOST_THREADS, os.cpu_count() or 1)
        items = read_items(self._found, self._config.task)
        outcomes = ordered_map(lambda item: _prepare(item, store, self._config.task, self._found.guard), items, threads)
        done = 0
        for outcome in outcomes:
            if isinstance(outcome, PreparedRecord) and ids.add(outcome.record.id) > 1:
                outcome = _duplicate(outcome)
            if isinstance(outcome, Note):
                report.warn(outcome.text)
                continue
            if isinstance(outcome, Rejection):
                report.reject(outcome)
            else:
                yield outcome
            done += 1
            if progress is not None:
                progress(done, total)

    def _row(self, prepared: PreparedRecord, report: Report) -> dict[str, Any]:
        """The manifest's row, counted in the report."""
        record, target, sources = prepared.record, prepared.target, prepared.sources
        images = [image for image in (target, *sources) if image is not None]
        sums = [source.original_sha256 for source in sources]
        shared = group_key(record, sums, self._config.task)
        split = self._splitter(record.id, shared)
        report.accept(
            split=split,
            prompt=record.prompt,
            has_target=target is not None,
            enlarged=sum(self._is_smaller(image) for image in images),
            unknown_keys=record.unknown_keys,
        )
        return {
            "id": record.id,
            "prompt": record.prompt,
            "split": split,
            "held_with": hashlib.sha256(shared.encode()).hexdigest(),
            "metadata": record.metadata,
            "target_file": prepared.target_file,
            **({} if target is None else _target_columns(target)),
            "width": self._config.width if images else None,
            "height": self._config.height if images else None,
            "source_images": [f"{IMAGES}/{source.name}" for source in sources],
            "source_sha256": [source.sha256 for source in sources],
            "source_original_sha256": sums,
        }

    @property
    def _is_segmentation(self) -> bool:
        return self._config.task == "segmentation"

    def _is_smaller(self, image: PreparedImage) -> bool:
        return image.original_width < self._config.width or image.original_height < self._config.height

    def _finish(self, report: Report) -> dict[str, Any]:
        config = self._config
        report.finish({"eval": config.eval_share, "held_out": config.held_out_share, SEALED: config.sealed_share})
        return {
            "path": self._config.path,
            "layout": self._found.layout.name,
            "height": self._config.height,
            "width": self._config.width,
            **report.as_dict(),
        }


def _prepare(item: Item, store: ImageStore, task: Task, guard: Guard) -> PreparedRecord | Rejection | Note:
    if not isinstance(item, RawRecord):
        return item
    try:
        record = checked(item, task, guard)
        if task == "segmentation":
            record, image, mask = prepare_query(store, record, item.extra)
            return PreparedRecord(place=item.place, record=record, target=mask, sources=(image,))
        target = None
        if record.target_image is not None:
            target = store.prepare(record.target_image, record.id, "target")
        sources = tuple(_prepare_source(store, record, number) for number in range(len(record.source_images)))
    except Rejected as rejected:
        return rejected.at(item.place, given_id(item))
    named = _in_unicode(item.target_image) if isinstance(item.target_image, str) else None
    return PreparedRecord(place=item.place, record=record, target=target, sources=sources, target_file=named)


def _in_unicode(name: str) -> str:
    """A file's name may hold bytes that are no UTF-8, which a table cannot."""
    return name.encode("utf-8", "backslashreplace").decode()


def _prepare_source(store: ImageStore, record: CheckedRecord, number: int) -> PreparedImage:
    try:
        return store.prepare(record.source_images[number], record.id, f"source{number}")
    except Rejected as rejected:
        raise Rejected(rejected.reason, f"source_image: {rejected.message}", rejected.remedy) from rejected


def _duplicate(prepared: PreparedRecord) -> Rejection:
    return Rejection(
        place=prepared.place,
        id=prepared.record.id,
        reason="duplicate_id",
        message="an earlier record has the same id",
        remedy="Give every record its own id, or leave ids out to get them made",
    )


def _target_columns(target: PreparedImage) -> dict[str, Any]:
    return {
        "target_image": f"{IMAGES}/{target.name}",
        "target_sha256": target.sha256,
        "target_original_sha256": target.original_sha256,
        "original_width": target.original_width,
        "original_height": target.original_height,
    }


def remove_unused_images(manifest: Path) -> None:
    """Removes prepared images that the manifest does not name, and what a killed run left half written."""
    folder = manifest.parent / IMAGES
    if not folder.is_dir():
        return
    with DiskCounter() as names:
        for path in image_paths(manifest):
            names.add(Path(path).name)
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_file() and not names.count(entry.name):
                    Path(entry.path).unlink()
