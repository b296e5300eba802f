"""From records as they were found to the manifest: check, prepare the images, split, report.

Memory does not grow with the data: records stream from the reader to the manifest, a few dozen at a time.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from visual_grpo.config import DataConfig, Task
from visual_grpo.errors import counted, sentence
from visual_grpo.images import pixel_limit
from visual_grpo.records.checks import checked, group_key, with_ids
from visual_grpo.records.detect import find_records
from visual_grpo.records.guard import Guard
from visual_grpo.records.image_store import ImageStore, PreparedImage
from visual_grpo.records.on_disk import DiskCounter
from visual_grpo.records.queries import prepare_query
from visual_grpo.records.raw import Item, Note, Place, RawRecord, Rejected, prefix_rejections, shorten
from visual_grpo.records.report import Report
from visual_grpo.records.split import SEALED, Splitter
from visual_grpo.records.table import RecordTable, write_manifest

IMAGES = "images"
"""Folder of the prepared images, beside the manifest."""
_MOST_THREADS = 8
_AHEAD = 8
"""Records of each thread that are prepared together."""
_SHOWN = 5

Progress = Callable[[int, int], None]
"""Called with (records done, records in total) after every record."""


class Preparation:
    """One dataset on its way to a manifest.

    Args:
        parameter: what names the path, for messages.

    Raises:
        UserError: nothing at ``config.path``, or no layout fits; nothing has been done yet.
    """

    def __init__(self, config: DataConfig, parameter: str = "data.path") -> None:
        self._config = config
        self._found = find_records(config, parameter)
        self._splitter = Splitter(
            eval_share=config.eval_share, held_out_share=config.held_out_share, sealed_share=config.sealed_share
        )

    def count(self) -> int:
        return self._found.count()

    def write(self, manifest: Path, progress: Progress | None = None) -> None:
        """Prepares every record, replaces the manifest and removes images that it no longer names.

        The old manifest and its images stay until the new one is complete.

        Raises:
            UserError: no usable record, none to train on, or with ``strict`` the first rejected one.
        """
        self.write_draft(manifest, progress)
        remove_unused_images(manifest)

    def write_draft(self, manifest: Path, progress: Progress | None = None) -> None:
        """Does as `write`, but leaves all other images beside the manifest: an older manifest there may name them."""
        config, report = self._config, Report(strict=self._config.strict)
        store = ImageStore(
            folder=manifest.parent / IMAGES, height=config.height, width=config.width, max_pixels=config.max_pixels
        )
        with warnings.catch_warnings(), pixel_limit(config.max_pixels):
            warnings.filterwarnings("ignore", module=r"PIL\.")  # odd EXIF data and the like do no harm
            rows = (self._row(prepared, report) for prepared in self._accepted(store, report, progress))
            write_manifest(manifest, rows, lambda: self._finish(report))

    def _accepted(self, store: ImageStore, report: Report, progress: Progress | None) -> Iterator[_Prepared]:
        """Prepares records in order; those that cannot be used go to the report."""
        total = self.count() if progress else 0
        threads = min(_MOST_THREADS, os.cpu_count() or 1)
        items = with_ids(self._found.items())
        prepare = partial(_prepare, store=store, task=self._config.task, guard=self._found.guard)
        done = 0
        with ThreadPoolExecutor(threads) as pool, DiskCounter() as ids:
            while batch := list(islice(items, _AHEAD * threads)):
                for outcome in pool.map(prepare, batch):
                    if isinstance(outcome, Note):
                        report.warn(outcome)
                        continue
                    if isinstance(outcome, _Prepared) and ids.add(outcome.record.id) > 1:
                        outcome = _duplicate(outcome.record)
                    if isinstance(outcome, Rejected):
                        report.reject(outcome)
                    else:
                        yield outcome
                    done += 1
                    if progress is not None:
                        progress(done, total)

    def _row(self, prepared: _Prepared, report: Report) -> dict[str, Any]:
        """The manifest's row, counted in the report."""
        record, target, sources, metadata, target_file = prepared
        config = self._config
        images = [image for image in (target, *sources) if image is not None]
        sums = [source.original_sha256 for source in sources]
        shared = group_key(record, sums, config.task)
        split = self._splitter(record.id, shared)
        smaller = [image.original_size[0] < config.width or image.original_size[1] < config.height for image in images]
        report.accept(
            split=split,
            prompt=record.prompt,
            has_target=target is not None,
            enlarged=sum(smaller),
        )
        return {
            "id": record.id,
            "prompt": record.prompt,
            "split": split,
            "held_with": hashlib.sha256(shared.encode()).hexdigest(),
            "metadata": metadata,
            "target_file": target_file,
            **({} if target is None else _target_columns(target)),
            "width": config.width if images else None,
            "height": config.height if images else None,
            "source_images": [f"{IMAGES}/{source.name}" for source in sources],
            "source_sha256": [source.sha256 for source in sources],
            "source_original_sha256": sums,
        }

    def _finish(self, report: Report) -> dict[str, Any]:
        config = self._config
        report.finish({"eval": config.eval_share, "held_out": config.held_out_share, SEALED: config.sealed_share})
        facts = {"path": config.path, "layout": self._found.layout, "height": config.height, "width": config.width}
        return facts | report.as_dict()


class _Prepared(NamedTuple):
    """A record whose images are stored."""

    record: RawRecord
    target: PreparedImage | None
    sources: tuple[PreparedImage, ...]
    metadata: str
    target_file: str | None


def _prepare(item: Item, store: ImageStore, task: Task, guard: Guard) -> _Prepared | Rejected | Note:
    if not isinstance(item, RawRecord):
        return item
    try:
        record = checked(item, task, guard)
        if task == "segmentation":
            metadata, image, mask = prepare_query(store, record)
            return _Prepared(record, mask, (image,), metadata, None)
        target = None
        if record.target_image is not None:
            target = store.prepare(record.target_image, record.id, "target")
        with prefix_rejections("source_image"):
            sources = tuple(
                store.prepare(source, record.id, f"source{number}")
                for number, source in enumerate(record.source_images)
            )
    except Rejected as rejected:
        return rejected.at(item.place, item.shown_id)
    # A file's name may hold bytes that are no UTF-8, which a table cannot.
    named = (
        item.target_image.encode("utf-8", "backslashreplace").decode() if isinstance(item.target_image, str) else None
    )
    return _Prepared(record, target, sources, record.metadata, named)


def _duplicate(record: RawRecord) -> Rejected:
    remedy = "Give every record its own id, or leave ids out to get them made"
    message = "an earlier record has the same id"
    return Rejected("duplicate_id", message, remedy, record.place, shorten(record.id))


def _target_columns(target: PreparedImage) -> dict[str, Any]:
    return {
        "target_image": f"{IMAGES}/{target.name}",
        "target_sha256": target.sha256,
        "target_original_sha256": target.original_sha256,
        "original_width": target.original_size[0],
        "original_height": target.original_size[1],
    }


def remove_unused_images(manifest: Path) -> None:
    """Removes prepared images that the manifest does not name, and what a killed run left half written."""
    folder = manifest.parent / IMAGES
    if not folder.is_dir():
        return
    with DiskCounter() as names, os.scandir(folder) as entries:
        for row in RecordTable(manifest).rows():
            for path in filter(None, [row["target_image"], *(row["source_images"] or ())]):
                names.add(Path(path).name)
        for entry in entries:
            if entry.is_file() and not names.count(entry.name):
                Path(entry.path).unlink()


@contextmanager
def prepared_beside(path: str, data: DataConfig, note: Callable[[str], None], parameter: str) -> Iterator[RecordTable]:
    """All records at ``path``, in any layout, checked, with images of the configured size; gone after the block.

    They are no training data: prompts to draw, pictures to score.

    Args:
        parameter: what names the path, for messages.
        note: is told which records and files were left out, and why.

    Raises:
        UserError: there is nothing at the path, no layout fits, or no record can be used.
    """
    no_splits = {"eval_share": 0.0, "held_out_share": 0.0, "sealed_share": 0.0}
    config = data.model_copy(update={"path": path, "layout": "auto", **no_splits})
    with TemporaryDirectory() as folder:
        manifest = Path(folder) / "records.parquet"
        Preparation(config, parameter).write(manifest)
        records = RecordTable(manifest)
        for text in _left_out(records.report):
            note(text)
        yield records


def _left_out(report: Mapping[str, Any]) -> Iterator[str]:
    """Lines that say what of the data is not used."""
    rejected = report["rejected"]
    if rejected["total"]:
        yield f"Left out {rejected['total']} of {counted(report['records'], 'record')}:"
        for one in rejected["listed"][:_SHOWN]:
            place, message = Place(one["file"], one["line"]), one["message"]
            yield f"  {message}" if one["file"] in message else f"  {place}: {message}"
        if rejected["total"] > _SHOWN:
            yield f"  and {rejected['total'] - _SHOWN} more"
    for warning in report["warnings"]:
        yield f"Note: {sentence(warning)}"
