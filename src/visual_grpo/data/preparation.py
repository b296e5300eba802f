"""From records as they were found to the manifest: check, prepare the images, split, report.

Memory does not grow with the data: records stream from the reader to the manifest, a few dozen at a time.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from visual_grpo.common.errors import counted, sentence
from visual_grpo.common.images import pixel_limit
from visual_grpo.config import DataConfig
from visual_grpo.data.checks import checked, group_key, with_ids
from visual_grpo.data.detect import find_records
from visual_grpo.data.image_store import ImageStore, PreparedImage
from visual_grpo.data.queries import prepare_query
from visual_grpo.data.raw import Item, Note, Place, RawRecord, Rejected, prefix_rejections, shorten
from visual_grpo.data.report import DiskCounter, Report
from visual_grpo.data.split import SEALED, split_of
from visual_grpo.data.table import RecordTable, write_manifest

IMAGES = "images"
"""Folder of the prepared images, beside the manifest."""
_MOST_THREADS = 8
_AHEAD = 8
"""Records of each thread that are prepared together."""
_SHOWN = 5

Prepared = tuple[dict[str, Any], int]
"""A row of the manifest, and how many of its images were smaller than the prepared size."""


class Preparation:
    """One dataset on its way to a manifest; ``parameter`` names its path in messages.

    Raises:
        UserError: nothing at ``config.path``, or no layout fits; nothing has been done yet.
    """

    def __init__(self, config: DataConfig, parameter: str = "data.path") -> None:
        self._config = config
        self._found = find_records(config, parameter)

    def count(self) -> int:
        return self._found.count()

    def write(self, manifest: Path, progress: Callable[[], object] = lambda: None) -> None:
        """Prepares every record, calling ``progress`` after each, and replaces the manifest.

        Raises:
            UserError: no usable record, none to train on, or with ``strict`` the first rejected one.
        """
        config, report = self._config, Report(strict=self._config.strict)
        size = {"height": config.height, "width": config.width}
        facts = {"path": config.path, "layout": self._found.layout, **size}
        shares = {"eval": config.eval_share, "held_out": config.held_out_share, SEALED: config.sealed_share}
        store = ImageStore(folder=manifest.parent / IMAGES, **size, max_pixels=config.max_pixels)
        with warnings.catch_warnings(), pixel_limit(config.max_pixels):
            warnings.filterwarnings("ignore", module=r"PIL\.")  # odd EXIF data and the like do no harm
            write_manifest(manifest, self._rows(store, report, progress), lambda: facts | report.finish(shares))

    def _rows(self, store: ImageStore, report: Report, progress: Callable[[], object]) -> Iterator[dict[str, Any]]:
        """The manifest's rows in the records' order; those that cannot be used go to the report."""
        threads = min(_MOST_THREADS, os.cpu_count() or 1)
        items = with_ids(self._found.items())
        with ThreadPoolExecutor(threads) as pool, DiskCounter() as ids:
            while batch := list(islice(items, _AHEAD * threads)):
                for item, outcome in zip(batch, pool.map(lambda item: self._prepare(item, store), batch), strict=True):
                    if isinstance(outcome, Note):
                        report.warnings.append(outcome)
                        continue
                    if isinstance(item, RawRecord) and isinstance(outcome, tuple) and ids.add(outcome[0]["id"]) > 1:
                        remedy = "Give every record its own id, or leave ids out to get them made"
                        message = "an earlier record has the same id"
                        outcome = Rejected("duplicate_id", message, remedy, item.place, shorten(outcome[0]["id"]))
                    if isinstance(outcome, Rejected):
                        report.reject(outcome)
                    else:
                        report.accept(*outcome)
                        yield outcome[0]
                    progress()

    def _prepare(self, item: Item, store: ImageStore) -> Prepared | Rejected | Note:
        if not isinstance(item, RawRecord):
            return item
        target, file = None, item.target_image
        try:
            record = checked(item, self._config.task, self._found.guard)
            if self._config.task == "segmentation":
                record, source, target = prepare_query(store, record)
                return self._row(record, [source], target, None)
            if record.target_image is not None:
                target = store.prepare(record.target_image, record.id, "target")
            with prefix_rejections("source_image"):
                sources = [
                    store.prepare(source, record.id, f"source{number}")
                    for number, source in enumerate(record.source_images)
                ]
        except Rejected as rejected:
            return rejected.at(item.place, item.shown_id)
        # A file's name may hold bytes that are no UTF-8, which a table cannot.
        file = file.encode("utf-8", "backslashreplace").decode() if isinstance(file, str) else None
        return self._row(record, sources, target, file)

    def _row(
        self, record: RawRecord, sources: list[PreparedImage], target: PreparedImage | None, target_file: str | None
    ) -> Prepared:
        config = self._config
        images = [*sources, *([] if target is None else [target])]
        shared = group_key(record, [source.original_sha256 for source in sources], config.task)
        row = {
            "id": record.id,
            "prompt": record.prompt,
            "split": split_of(record.id, shared, config),
            "held_with": hashlib.sha256(shared.encode()).hexdigest(),
            "metadata": record.metadata,
            "target_file": target_file,
            "width": config.width if images else None,
            "height": config.height if images else None,
            "source_images": [f"{IMAGES}/{source.name}" for source in sources],
            "source_sha256": [source.sha256 for source in sources],
            "source_original_sha256": [source.original_sha256 for source in sources],
        }
        if target is not None:
            row |= {
                "target_image": f"{IMAGES}/{target.name}",
                "target_sha256": target.sha256,
                "target_original_sha256": target.original_sha256,
                "original_width": target.original_size[0],
                "original_height": target.original_size[1],
            }
        sizes = [image.original_size for image in images]
        return row, sum(width < config.width or height < config.height for width, height in sizes)


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
    """All records at ``path``, prepared as ``data`` says, for the time of the block: to draw or to score.

    ``note`` is told which records and files were left out, and why.
    """
    no_splits = {"eval_share": 0.0, "held_out_share": 0.0, "sealed_share": 0.0}
    config = data.model_copy(update={"path": path, "layout": "auto", **no_splits})
    with TemporaryDirectory() as folder:
        manifest = Path(folder) / "records.parquet"
        Preparation(config, parameter).write(manifest)
        records = RecordTable(manifest)
        report, rejected = records.report, records.report["rejected"]
        if rejected["total"]:
            note(f"Left out {rejected['total']} of {counted(report['records'], 'record')}:")
            for one in rejected["listed"][:_SHOWN]:
                place, message = Place(one["file"], one["line"]), one["message"]
                note(f"  {message}" if one["file"] in message else f"  {place}: {message}")
            if rejected["total"] > _SHOWN:
                note(f"  and {rejected['total'] - _SHOWN} more")
        for warning in report["warnings"]:
            note(f"Note: {sentence(warning)}")
        yield records
