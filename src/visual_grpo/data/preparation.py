"""Turns records as they are read into the manifest: checks them, prepares the images, splits.

Records stream from the reader to the manifest, a few dozen at a time; only their ids, hashes and looks stay in memory,
about half a kilobyte a record.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from visual_grpo.common import console
from visual_grpo.common.errors import sentence
from visual_grpo.common.images import pixel_limit
from visual_grpo.config import DataConfig
from visual_grpo.config.data import ColumnsConfig
from visual_grpo.data.checks import checked
from visual_grpo.data.found import Found
from visual_grpo.data.hub_dataset import at_commit, commit_of
from visual_grpo.data.image_store import CHOOSE_VALUE, ImageStore, PreparedImage
from visual_grpo.data.manifest import IMAGES, RecordTable, write_manifest
from visual_grpo.data.near_copies import NearCopies
from visual_grpo.data.preparation_report import Report, also_rejected
from visual_grpo.data.record import Item, Note, Place, Record, Rejected
from visual_grpo.data.sources import find_records
from visual_grpo.data.splits import (
    ALL,
    HELD_OUT,
    SEALED,
    Groups,
    assign_splits,
    is_split,
    prompt_key,
    split_group,
    usual_name,
)

_MAX_THREADS = 8
_SAME_SHAPE = 1.02
"""Ratio of two aspect ratios that is still taken for rounding."""
_CROPPED = 1.51
"""Ratio of aspect ratios, with rounding, above which more than a third is cropped away: 16:9 to 1:1 loses 44%."""
_MARKS = {
    "[trigger]": r"\[(?:trigger|name)\]",
    "a weight": r"\([^()]+:\d*\.\d+\)|\(\([^()]+\)\)",
    "<lora:NAME>": r"<(?:lora|lyco|hypernet):[^<>]+>",
    "a wildcard": r"__[\w/-]+__|\{[^{}|]+\|[^{}]+\}",
    "an option such as --ar": r"(?<!\S)--[a-z]+(?!\S)",
    "the separator |||": r"\|\|\|",
    "a place of an image": r"<(?:image|img)>|<\|image_\d+\|>",
    "an HTML entity": r"&(?:\w{2,6}|#\d+);",
}
"""Syntax that other programs replace in a prompt or take out of it (ai-toolkit, kohya, web interfaces, Midjourney, chat
templates, web pages) -> its pattern."""
_BATCH = 8
"""Records of each thread that are prepared together."""


class Prepared(NamedTuple):
    """The manifest's row of an accepted record."""

    row: dict[str, Any]
    contents: tuple[str, ...]
    """Contents that no other split may show: the record's default group, and the digests of its pictures."""
    notes: Sequence[Note]
    label: int | None
    looks: tuple[bytes, ...]
    """Digests of how its pictures look (`near_copies.look_of`); none where a group is given, which says what is seen
    together."""
    query: tuple[str, str] | None = None
    """The text of a query and the digest of its image."""


class Preparation:
    """Prepares one dataset. Raises UserError as `find_records` does."""

    def __init__(self, config: DataConfig) -> None:
        self._config = config = at_commit(config)
        self.source = find_records(config)
        self._report, self._found = Report(config), Found(self.source)
        self._groups = Groups(holds_out=bool(config.held_out_split))
        self._looks: list[tuple[bytes, ...]] = []
        """`Prepared.looks` of each row of the draft."""

    def write(self, manifest: Path, progress: Callable[[], object] = lambda: None) -> Report:
        """Prepares every record, calling ``progress`` after each; the manifest has the report, too.

        The splits are known when the last picture has been read: the manifest is written twice. Raises UserError for no
        usable record, none to train on, or with ``strict`` the first rejected one.
        """
        config, report = self._config, self._report
        facts = {"path": config.path, "layout": self.source.layout, "height": config.height, "width": config.width}
        facts |= {"commit": commit_of(config)}
        store = ImageStore(manifest.parent / IMAGES, config)
        without_splits = manifest.with_suffix(".draft")
        try:
            with warnings.catch_warnings(), pixel_limit(config.max_pixels):
                warnings.filterwarnings("ignore", module=r"PIL\.")  # Odd EXIF data and the like do no harm.
                write_manifest(without_splits, self._rows(store, progress))
            report.warnings += self._splits_not_used()
            rows = self._with_splits(RecordTable(without_splits))
            write_manifest(manifest, rows, lambda: facts | report.finish(self._found.finish()))
        finally:
            without_splits.unlink(missing_ok=True)
        return report

    def _rows(self, store: ImageStore, progress: Callable[[], object]) -> Iterator[dict[str, Any]]:
        """Yields the manifest's rows in the records' order, without their splits; rejections go to the report."""
        threads = min(_MAX_THREADS, os.cpu_count() or 1)
        items = with_ids(self.source.read(self._found.add))
        earlier = _Earlier()
        with ThreadPoolExecutor(threads) as pool:
            while batch := list(islice(items, _BATCH * threads)):
                outcomes = pool.map(lambda item: self._prepare(item, store), batch)
                for item, outcome in zip(batch, outcomes, strict=True):
                    if isinstance(outcome, Note):
                        self._report.note(outcome)
                        continue
                    if isinstance(outcome, Prepared):
                        outcome = earlier.conflict(outcome, item.place) or outcome
                    if isinstance(outcome, Rejected):
                        self._report.reject(outcome)
                    else:
                        for note in (*outcome.notes, *earlier.notes(outcome.row)):
                            self._report.note(note.at(item.place))
                        is_held_out = outcome.row["split"] == HELD_OUT
                        self._groups.add(outcome.row["split_group"], outcome.contents, held_out=is_held_out)
                        self._looks.append(outcome.looks)
                        yield outcome.row
                    progress()

    def _splits_not_used(self) -> Iterator[str]:
        unused = sorted(str(split) for split in self.source.splits if split not in self.source.chosen)
        only = next(iter(self.source.chosen)) if len(self.source.chosen) == 1 else None
        if unused:
            yield (
                f"the data's {' and '.join(unused)} {'is' if len(unused) == 1 else 'are'} not used:"
                f" data.held_out_split={unused[0]} evaluates on it, data.split={ALL} trains on every split"
            )
        elif self.source.folder and self._config.split is None and usual_name(only) not in (None, "train"):
            yield f"the data's only split is {only}: it is divided like data without splits"

    def _with_splits(self, draft: RecordTable) -> Iterator[dict[str, Any]]:
        """Yields the rows with their splits, without those that share a prompt or a picture with `held_out_split`."""
        held_out, self._report.joined = self._groups.held_out(), self._groups.joined
        known = ((self._groups.of(row["split_group"]), row["id"]) for row in draft.rows() if row["split"] != HELD_OUT)
        free = [(key, name) for key, name in known if key not in held_out]
        splits, self._report.groups = iter(assign_splits(free, self._config)), len({key for key, _ in free})
        near = NearCopies()
        for row, looks in zip(draft.rows(), self._looks, strict=True):
            key = self._groups.of(row["split_group"])
            if row["split"] != HELD_OUT and key in held_out:
                message = f"its prompt, its picture or its group is in the split {self._config.held_out_split}, too"
                place = Place(row["target_file"] or self._config.path)
                self._report.reject(Rejected("also_held_out", message, "It does not train").at(place, row["id"]))
                continue
            row["split"] = row["split"] or next(splits)
            row["split_group"] = hashlib.sha256(key.encode()).hexdigest()
            self._report.accept(row)
            if row["split"] != SEALED:
                near.add(row["target_file"] or row["id"], looks, held_out=row["split"] == HELD_OUT)
            yield row
        self._report.warnings += near.notes()

    def _prepare(self, item: Item, store: ImageStore) -> Prepared | Rejected | Note:
        if not isinstance(item, Record):
            return item
        target, label, is_query = None, None, self._config.task == "segmentation"
        notes: list[Note] = []
        try:
            record = checked(item, self._config.task, self.source.limits)
            if is_query:
                record, source, target, notes, label = store.prepare_query(record)
                sources = [source]
            else:
                if record.target_image is not None:
                    prepare = store.prepare if self._config.frames is None else store.prepare_video
                    target = prepare(record.target_image, record.id, "target")
                sources = [
                    store.prepare(image, record.id, f"reference{number}" if number else "source0")
                    for number, image in enumerate(record.source_images)
                ]
        except Rejected as rejected:
            return rejected.at(item.place, item.id)
        originals = [source.original_sha256 for source in sources]
        row = {
            "id": record.id,
            "prompt": record.prompt,
            "split": HELD_OUT if is_split(record.split, self._config.held_out_split) else "",
            "split_group": split_group(record, originals, self._config.task),
            "metadata": record.metadata,
            "source_images": [f"{IMAGES}/{source.name}" for source in sources],
            "source_sha256": [source.sha256 for source in sources],
        }
        if target is not None:
            row |= {
                "target_image": f"{IMAGES}/{target.name}",
                "target_sha256": target.sha256,
                "original_width": target.original_size[0],
                "original_height": target.original_size[1],
            }
        if isinstance(item.target_image, str) and not is_query:
            # It may hold bytes that are not UTF-8, which Parquet refuses.
            row["target_file"] = item.target_image.encode("utf-8", "backslashreplace").decode()
        notes += self._notes(record.prompt, sources, target)
        shown = [*sources, *([] if target is None or is_query else [target])]  # Many queries may have the same mask.
        ungrouped = split_group(replace(record, group=None), originals, self._config.task)
        query = (prompt_key(record.prompt), sources[0].sha256) if is_query else None
        looks = tuple(image.look for image in shown if image.look is not None and record.group is None)
        return Prepared(row, (ungrouped, *(image.sha256 for image in shown)), notes, label, looks, query)

    def _notes(self, prompt: str, sources: Sequence[PreparedImage], target: PreparedImage | None) -> Iterator[Note]:
        for image in sources[:1]:  # Those after the first keep their shape.
            yield from self._resized("image", image.original_size)
        if not any(map(str.isalpha, prompt)):
            yield Note("prompt", "without a letter: labels for a detector, for example, are not prompts")
        if re.fullmatch('"[^"]*",?', prompt):
            yield Note("prompt", "entirely in quotes, which count as part of the prompt: remove the quotes of a list")
        for mark, written in _MARKS.items():
            if re.search(written, prompt):
                yield Note("prompt", f"with {mark}, which is not interpreted: the model reads it as it stands")
        if target is not None:
            yield from self._resized("image" if self._config.frames is None else "video", target.original_size)
            shapes = sorted(width / height for width, height in (one.original_size for one in (*sources[:1], target)))
            if self._config.task != "segmentation" and shapes[-1] > _SAME_SHAPE * shapes[0]:
                yield Note("edit", "source and target have different shapes: each is cropped by itself")
            if target.goes_on:
                read = f"data.frames={self._config.frames} at data.fps={self._config.fps:g}"
                yield Note("video", f"longer than {read}: the rest is not used")

    def _resized(self, kind: str, size: tuple[int, int]) -> Iterator[Note]:
        """Says what becomes of an original of a different size, (width, height); queries are stretched, not cropped."""
        (width, height), (to_width, to_height) = size, (self._config.width, self._config.height)
        ratio = width / height * to_height / to_width
        if self._config.task != "segmentation" and max(ratio, 1 / ratio) > _CROPPED:
            yield Note(kind, "of a different shape: more than a third is cropped away")
        if width < to_width or height < to_height:
            yield Note(kind, "smaller than the prepared size: enlarged")


class _Earlier:
    """Contents of the accepted records, with which later ones must not conflict."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._labels: dict[str, int] = {}
        """Query -> the number that its object is stored as."""
        self._queries: dict[tuple[str, str], Place] = {}
        """Query and digest of its image -> the first record."""
        self._seen = set[bytes]()
        """Digests of everything that the records have but their ids."""

    def conflict(self, prepared: Prepared, place: Place) -> Rejected | None:
        """Returns why the record at a place cannot be used with the earlier ones; None adds it to them."""
        rejected = self._conflict(prepared, place)
        return None if rejected is None else rejected.at(place, prepared.row["id"])

    def notes(self, row: Mapping[str, Any]) -> Iterator[Note]:
        what = (row["prompt"], row.get("target_sha256"), row["source_sha256"], row["metadata"])
        digest = hashlib.sha256(repr(what).encode()).digest()
        if digest in self._seen:
            yield Note("record", "repeated: an earlier one is the same, pictures and metadata included; each counts")
        self._seen.add(digest)

    def _conflict(self, prepared: Prepared, place: Place) -> Rejected | None:
        row, label = prepared.row, prepared.label
        if row["id"] in self._ids:
            remedy = "Give every record its own id, or leave ids out to get them made"
            return Rejected("duplicate_id", "an earlier record has the same id", remedy)
        if label is not None and (number := self._labels.setdefault(row["prompt"], label)) != label:
            message = f"the object is stored as {label}, and as {number} in an earlier mask of {row['prompt']!r}"
            return Rejected("ambiguous_mask", message, CHOOSE_VALUE)
        if prepared.query is not None and (first := self._queries.setdefault(prepared.query, place)) != place:
            message = f"an earlier record, {first}, asks the same about the same image"
            return Rejected("duplicate_query", message, "Merge their masks into one, or remove one of the records")
        self._ids.add(row["id"])
        return None


def with_ids(items: Iterator[Item]) -> Iterator[Item]:
    """Yields the items, records without an id with a hash of their content.

    It depends on the record's folder, prompt and images, and on the number of identical records before it: adding or
    reordering other records does not change it.
    """
    repetitions: Counter[bytes] = Counter()
    for item in items:
        if isinstance(item, Record) and item.id is None:
            prompt = item.prompt.strip() if isinstance(item.prompt, str) else item.prompt
            parts = (PurePosixPath(item.place.file).parent, prompt, item.target_image, item.source_images)
            content = "\0".join(map(str, parts)).encode("utf-8", "surrogatepass")
            key = hashlib.sha256(content).digest()
            repetitions[key] += 1
            item = replace(item, id=hashlib.sha256(b"%b\0%d" % (content, repetitions[key])).hexdigest()[:16])
        yield item


def remove_unused_images(manifest: Path) -> None:
    """Removes prepared images that the manifest does not name, and drafts of a run that was killed."""
    folder = manifest.parent / IMAGES
    used = set()
    for row in RecordTable(manifest).rows():
        used |= {Path(image).name for image in (row["target_image"], *(row["source_images"] or ())) if image}
    for file in folder.glob("*"):
        if file.name not in used:
            shutil.rmtree(file) if file.is_dir() else file.unlink()


@contextmanager
def ad_hoc_records(path: str, data: DataConfig, parameter: str) -> Iterator[RecordTable]:
    """Prepares all records at ``path``, the value of ``parameter``, with the settings ``data``, without splits, for the
    time of the block. A dataset of the hub other than the one at ``data.path`` is read at its main branch."""
    no_splits = {"split": ALL, "held_out_split": None, "eval_share": 0.0, "held_out_share": 0.0, "sealed_share": 0.0}
    changes = {"layout": "auto", "columns": ColumnsConfig(), **no_splits}
    if path == data.path:
        parameter = data.parameter  # Messages are about data.config, too.
    else:
        changes |= {"revision": None, "config": None}
    config = data.model_copy(update=changes).at(path, parameter)
    with TemporaryDirectory() as folder:
        manifest = Path(folder) / "records.parquet"
        report = Preparation(config).write(manifest)
        rejected = also_rejected(report.rejections, report.reasons.total())
        for line in (*rejected.strip().splitlines(), *(f"Note: {sentence(warning)}" for warning in report.warnings)):
            console.note(line)
        yield RecordTable(manifest)
