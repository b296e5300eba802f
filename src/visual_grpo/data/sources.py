"""Detects the layout of a folder, file, archive or hub dataset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path, PurePath
from typing import NamedTuple

from visual_grpo.common.errors import Remedy, UserError, nearest_hint
from visual_grpo.common.files import settled
from visual_grpo.config import DataConfig
from visual_grpo.config.data import HUB, ColumnsConfig
from visual_grpo.data import coco, folders, tabular
from visual_grpo.data.archives import unzipped
from visual_grpo.data.record import (
    VIDEO_SUFFIXES,
    Item,
    Limits,
    Note,
    Place,
    Record,
    Rejected,
    is_image_name,
    is_system_file,
    listed,
)
from visual_grpo.data.splits import chosen_splits, split_found, usual_name
from visual_grpo.data.tabular import is_saved


class Layout(NamedTuple):
    """A way in which people keep records; ``files`` describes it in messages."""

    find: Callable[[Path, Limits], Path | None]
    """Returns the file or folder to read in a path; None if the layout does not fit."""
    read: Callable[[Path, Limits, DataConfig], Iterator[Item]]
    files: str


LAYOUTS = {
    "records": Layout(tabular.find_records, tabular.read_records, "records.jsonl with a prompt on each line"),
    "prompts": Layout(
        folders.find_prompts,
        folders.read_prompts,
        "prompts.txt with a prompt on each line and, where you have them, target_images/0.png, 1.png, ..., or train.txt"
        " and test.txt without pictures",
    ),
    "image_folder": Layout(
        tabular.find_metadata,
        tabular.read_metadata,
        "metadata.jsonl or metadata.csv (also in folders below) with file_name and text, prompt or caption",
    ),
    "captions": Layout(
        folders.find_captions,
        folders.read_captions,
        "images or videos with a caption of the same name beside them, such as cat.jpg with cat.txt or cat.caption",
    ),
    "table": Layout(
        tabular.find_table,
        tabular.read_table,
        "*.parquet, *.csv, *.tsv, *.jsonl, *.json (a list of objects) or *.tar, also in data, or a folder of"
        " save_to_disk, with a column for the prompt",
    ),
    "coco_captions": Layout(coco.find_captions, coco.read_captions, "COCO captions (*.json) next to the images"),
    "coco": Layout(coco.find_coco, coco.read_coco, "COCO annotations (*.json) next to the images"),
    "masks": Layout(
        folders.find_masks, folders.read_masks, "images/a.png with masks/THING/a.png, or masks/a.png with masks/a.txt"
    ),
}
"""Name -> layout, in the order in which ``auto`` tries them."""
_SEGMENTATION_ORDER = ("records", "masks", "coco", "image_folder", "table", "prompts", "captions")
_WITH_COLUMNS = ("records", "image_folder", "table")
"""Layouts that read ``data.columns``."""
_QUERIES = ("coco", "masks")
"""Layouts of queries about an image alone."""
_IN_SUBFOLDERS = ("image_folder", "captions")
"""Layouts of one dataset in several folders."""
EMBEDDING = ("table", "coco")
"""Layouts whose images are decoded as the records are read."""


@dataclass(frozen=True)
class RecordSource:
    """Records in a known layout; a dataset of the hub is a ``table``."""

    layout: str
    path: Path
    limits: Limits
    data: DataConfig
    folder: Path | None = None
    """The folder with the files of the records; None = one file, or a saved dataset or one of the hub."""

    @cached_property
    def splits(self) -> Counter[str | None]:
        """Number of records, also of those that will be rejected, in each split that was found; None = in none."""
        if self.layout == "table" and (rows := tabular.count_table(self.path, self.limits, self.data)) is not None:
            return rows
        read = partial(coco.read_coco, draw=False) if self.layout == "coco" else LAYOUTS[self.layout].read
        items = read(self.path, self.limits, self.data)
        return Counter(split_found(item, self.layout) for item in items if not isinstance(item, Note))

    @cached_property
    def chosen(self) -> frozenset[str | None]:
        return chosen_splits(self.splits, self.data)

    def read(self, see: Callable[[Record | Rejected], object] = lambda item: None) -> Iterator[Item]:
        """Yields the records of the chosen splits, each with its split; ``see`` is called with all records."""
        columns = dict[str, None]()
        for item in LAYOUTS[self.layout].read(self.path, self.limits, self.data):
            if isinstance(item, Note):
                yield item
                continue
            if isinstance(item, Record) and (forgotten := {*item.found} - {*item.columns}):
                raise AssertionError(f"{self.layout}, {item.place}: nothing says what became of {sorted(forgotten)}")
            columns |= dict.fromkeys(item.columns)
            item = replace(item, split=split_found(item, self.layout))
            see(item)
            if item.split in self.chosen:
                yield item
        for name in self.data.columns.ignored if columns else ():
            if name not in columns:
                hint = nearest_hint(name, columns)
                yield Note("column", f"of data.columns.ignored is in no record.{hint}", Place(name))

    def count(self) -> int:
        return sum(self.splits[split] for split in self.chosen)


def find_records(data: DataConfig) -> RecordSource:
    """Finds the records at ``data.path``, in ``data.layout`` or the first that fits.

    Raises UserError if the path does not exist, no layout fits, several folders below are datasets of their own, or the
    file with the records leads outside the data's folder.
    """
    if data.path.startswith(HUB):
        path = Path(data.path.removeprefix(HUB), "none")  # No local file belongs to the dataset.
        return RecordSource("table", path, Limits.from_config(data, path), data)
    path, parameter = settled(Path(data.path)), data.parameter
    try:
        if not path.exists():
            raise UserError(f"{parameter}: {path} does not exist.{_suggestions(path, parameter)}")
        if path.is_dir():
            next(path.iterdir(), None)
    except OSError as error:
        raise UserError(f"{parameter}: {path} cannot be opened ({error.strerror}). Check its permissions.") from error
    if path.suffix.lower() == ".zip" and path.is_file():
        path = unzipped(path, data)
    limits = Limits.from_config(data, path)
    name, file = _layout_of(path, limits, data)
    if name in _QUERIES and data.task != "segmentation":
        text = f"The records in {data.path} are queries about an image with a mask, and data.task is {data.task}."
        raise UserError(text, remedy=Remedy(environment="negative_points"))
    if data.columns != ColumnsConfig() and name not in _WITH_COLUMNS:
        raise UserError(
            f"data.columns is for tables, and {data.path} is read as {name}. Leave data.columns out, or give the table:"
            f" --params={parameter}=FILE."
        )
    return RecordSource(name, file, limits, data, folder=path if path.is_dir() and not is_saved(path) else None)


def _layout_of(path: Path, limits: Limits, data: DataConfig) -> tuple[str, Path]:
    """Returns the name of the layout, and the file or folder to read. Raises UserError if none fits."""
    order = _SEGMENTATION_ORDER if data.task == "segmentation" else tuple(LAYOUTS)
    names = order if data.layout == "auto" else (data.layout,)
    if data.columns != ColumnsConfig():  # Who names columns means a table.
        names = tuple(sorted(names, key=lambda name: name not in _WITH_COLUMNS))
    for name in names:
        if (file := LAYOUTS[name].find(path, limits)) is None:
            continue
        if file != path:  # The path that the user names may be a link.
            limits.require_inside(file)
        if (path.is_dir() and data.layout == "auto" and name in _IN_SUBFOLDERS) and not any(
            is_image_name(entry.name) or tabular.is_metadata(entry) for entry in path.iterdir()
        ):  # Tables may lie next to images without being meant, such as a log in CSV.
            _refuse_several(path, limits, data.parameter, names, ignored=EMBEDDING)
        return name, file
    if path.is_dir():
        _refuse_several(path, limits, data.parameter, names)
    raise UserError(_no_layout_fits(path, limits, data, names))


def _refuse_several(
    path: Path, limits: Limits, parameter: str, names: Collection[str], ignored: Collection[str] = ()
) -> None:
    """Raises a UserError if folders in ``path`` are separate datasets, which are not read together."""
    layouts: dict[Path, str] = {}
    for folder in sorted(entry for entry in path.iterdir() if entry.is_dir() and not is_system_file(entry.name)):
        fits = (name for name in names if limits.is_inside(folder) and LAYOUTS[name].find(folder, limits) is not None)
        if (layout := next(fits, None)) is not None:
            layouts[folder] = layout
    kinds = {*layouts.values()} - {*ignored}
    if len(kinds) > 1 or (kinds and not kinds & {*_IN_SUBFOLDERS}):
        each = ", ".join(f"{folder.name} ({layout})" for folder, layout in layouts.items())
        first = next((folder for folder in layouts if usual_name(folder.name) == "train"), next(iter(layouts)))
        raise UserError(
            f"{parameter}: {path} has its records in folders below: {each}. Give one: --params={parameter}={first}"
        )


def _suggestions(path: Path, parameter: str) -> str:
    """Returns what else could be meant by a path that does not exist."""
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    if f"{path.name}.dvc" in siblings:
        return f" DVC has it in {path.name}.dvc: fetch it with dvc pull."
    text = f"{nearest_hint(path.name, siblings)} Give a folder or file with records: --params={parameter}=FOLDER."
    if not path.is_absolute() and len(path.parts) == 2 and not path.parent.is_dir():
        text += f" For a dataset of the Hugging Face hub: --params={parameter}={HUB}{path}."
    if parameter == "data.path":
        text += " Without data.path, the pipeline starter renders the default dataset."
    return text


def _no_layout_fits(path: Path, limits: Limits, data: DataConfig, layouts: Collection[str]) -> str:
    names, parameter = list(limits.walk(path)) if path.is_dir() else [path.name], data.parameter
    kinds = Counter(PurePath(name).suffix.lower() or "without suffix" for name in names)
    has = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(5)) or "no files"
    image = next(map(PurePath, filter(is_image_name, names)), None)
    closed = [name for name in listed(path) if name.endswith("/")] if path.is_dir() else []
    hint = f" The folder {', '.join(closed)} cannot be opened: check its permissions." if closed else ""
    if image and "captions" in layouts and data.task != "segmentation":
        of_frames = f", and for its folder no {image.parent}.txt" if limits.videos and image.parent.name else ""
        hint = f" No image has a caption: for {image} there is no {image.with_suffix('.txt')}{of_frames}."
    texts = [name for name in names if PurePath(name).suffix.lower() in (".json", ".txt", ".csv")]
    if texts:
        hint += f" {', '.join(texts[:3])}{', ...' * (len(texts) > 3)}: none of these fits."
    if ".json" in kinds:
        hint += " A table in JSON is a list of objects, one a record."
    below = (name for name in names if "/" in name and PurePath(name).suffix.lower() in tabular.SUFFIXES)
    if "table" in layouts and (table := next(below, None)) is not None:
        hint += f" A table is read from its own folder: {parameter}={(path / table).parent}."
    of_folders = {f"{PurePath(name).parent}.txt" for name in filter(is_image_name, names)}
    if not limits.videos and (VIDEO_SUFFIXES & kinds.keys() or not of_folders.isdisjoint(names)):
        hint += " Videos are read where data.frames says how many frames they have."
    if ".dvc" in kinds:
        hint = f" DVC tracks data in {next(name for name in names if name.endswith('.dvc'))}: fetch them with dvc pull."
    if ".zip" in kinds:
        hint += (
            f" An archive is read by itself: {parameter}={path / next(n for n in names if n.lower().endswith('.zip'))}."
        )
    if path.is_dir() and (snapshots := sorted(path.glob("snapshots/*"))):
        hint = f" It is a folder of the hub's cache, with the files in {snapshots[-1]}."
    tried = "".join(f"\n  {name}: {LAYOUTS[name].files}" for name in layouts)
    return f"{parameter}: no records found in {path}, which has {has}.{hint} Looked for:{tried}"
