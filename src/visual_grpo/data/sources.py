"""Detects the layout of a folder, file, archive or hub dataset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePath
from typing import Any
from zipfile import BadZipFile, ZipFile

from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.common.files import file_digest, fresh_folder
from visual_grpo.config import DataConfig, Task
from visual_grpo.config.command import Command
from visual_grpo.data import folders, tables
from visual_grpo.data.record import Item, Limits, Note, is_image_name, is_system_file

_MOST_NAMES = 100_000
"""Files of a folder without records that are looked at for the message."""


@dataclass(frozen=True)
class Layout:
    """Finds its file or folder in a path (``find``), and reads it."""

    find: Callable[[Path, Limits], Path | None]
    read: Callable[..., Iterator[Item]]
    files: str


LAYOUTS = {
    "records": Layout(tables.find_records, tables.read_records, "records.jsonl with a prompt on each line"),
    "prompts": Layout(
        folders.find_prompts,
        folders.read_prompts,
        "prompts.txt with a prompt on each line and, where you have them, target_images/0.png, 1.png, ...",
    ),
    "image_folder": Layout(
        tables.find_metadata,
        tables.read_metadata,
        "metadata.jsonl or metadata.csv (also in folders below) with file_name and text, prompt or caption",
    ),
    "captions": Layout(
        folders.find_captions,
        folders.read_captions,
        "images with a caption of the same name, such as cat.jpg with cat.txt",
    ),
    "table": Layout(
        tables.find_table,
        tables.read_table,
        "*.parquet, *.csv or *.jsonl (also in data), or a folder of save_to_disk, with a column for the prompt",
    ),
    "coco": Layout(folders.find_coco, folders.read_coco, "COCO annotations (*.json) beside the images"),
    "masks": Layout(
        folders.find_masks, folders.read_masks, "images/a.png with masks/THING/a.png, or masks/a.png with masks/a.txt"
    ),
}
"""By name, in the order in which ``auto`` tries them."""

_MASKS_FIRST = ("records", "masks", "coco", "image_folder", "table", "prompts", "captions")
"""The order for queries."""
_IN_SUBFOLDERS = ("image_folder", "captions")
"""Layouts of one dataset in several folders."""
EMBEDDING = ("table", "coco", "hub")
"""Layouts whose images are decoded as the records are read."""


@dataclass(frozen=True)
class Found:
    """Records in a known layout."""

    layout: str
    path: Path | str
    """The file or folder that is read, or the name of a hub dataset."""
    limits: Limits
    data: DataConfig

    def items(self, task: Task | None = None) -> Iterator[Item]:
        task = task or self.data.task
        if self.layout == "hub":
            return tables.read_hub(str(self.path), self.limits, task, self.data.split, self.data.revision)
        more: dict[str, Any] = {"split": self.data.split} if self.layout == "table" else {}
        return LAYOUTS[self.layout].read(self.path, self.limits, task, **more)

    def count(self) -> int:
        known = tables.count_table(Path(self.path), self.data.split) if self.layout == "table" else None
        return sum(not isinstance(item, Note) for item in self.items()) if known is None else known


def find_records(data: DataConfig, parameter: str = "data.path") -> Found:
    """Finds the records at ``data.path``, in ``data.layout`` or the first that fits.

    Raises:
        UserError: the path does not exist, no layout fits, several folders below are datasets of their own, or the file
            with the records leads outside the data's folder.
    """
    if data.path.startswith(tables.HUB):
        # No file of this machine belongs to it.
        return Found("hub", data.path, Limits.of(data, Path(data.path.removeprefix(tables.HUB), "none")), data)
    path = Path(data.path)
    if not path.exists():
        raise UserError(f"{parameter}: there is no {path}.{_other_places(path, parameter)}")
    if path.suffix.lower() == ".zip" and path.is_file():
        path = _unzipped(path)
    limits = Limits.of(data, path)
    names = [data.layout] if data.layout != "auto" else _MASKS_FIRST if data.task == "segmentation" else list(LAYOUTS)
    for name in names:
        if (found := LAYOUTS[name].find(path, limits)) is None:
            continue
        if found != path:  # What the user has named may be a link.
            limits.require_inside(found)
        if path.is_dir() and data.layout == "auto" and name in _IN_SUBFOLDERS:
            own = (is_image_name(entry.name) or tables.is_metadata(entry.name) for entry in path.iterdir())
            if not any(own):
                # Tables may lie beside images without being meant, such as a log in CSV.
                _refuse_several(path, limits, parameter, names, ignored=EMBEDDING)
        return Found(name, found, limits, data)
    if path.is_dir():
        _refuse_several(path, limits, parameter, names)
    raise UserError(_nothing_found(path, limits, parameter, names))


def _unzipped(path: Path) -> Path:
    """The folder that an archive is unpacked into, in the cache of `datasets`; its only folder, if it has one."""
    from datasets import config

    folder = Path(config.EXTRACTED_DATASETS_PATH) / file_digest(path)
    if not folder.is_dir():
        try:
            with ZipFile(path) as archive, fresh_folder(folder) as draft:
                archive.extractall(draft)
        except (BadZipFile, NotImplementedError, RuntimeError, OSError) as error:
            raise UserError(f"{path} cannot be unpacked ({error}). Unpack it yourself and give the folder.") from error
    inside = [entry for entry in folder.iterdir() if not is_system_file(entry.name)]
    return inside[0] if len(inside) == 1 and inside[0].is_dir() else folder


def _refuse_several(
    path: Path, limits: Limits, parameter: str, names: Collection[str], ignored: Collection[str] = ()
) -> None:
    """Raises a UserError if folders in ``path`` are datasets of their own, which are not read together."""
    found: dict[str, str] = {}
    for folder in sorted(entry for entry in path.iterdir() if entry.is_dir() and not is_system_file(entry.name)):
        if limits.is_inside(folder):
            fits = (name for name in names if LAYOUTS[name].find(folder, limits) is not None)
            if (layout := next(fits, None)) is not None:
                found[folder.name] = layout
    layouts = set(found.values()) - {*ignored}
    if len(layouts) > 1 or (layouts and not layouts & {*_IN_SUBFOLDERS}):
        each = ", ".join(f"{name} ({layout})" for name, layout in found.items())
        example = path / next(iter(found))
        raise UserError(
            f"{parameter}: {path} has its records in folders below: {each}. Give one: --params={parameter}={example}"
        )


def _other_places(path: Path, parameter: str) -> str:
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    text = f"{nearest_hint(path.name, siblings)} Give a folder or file with records: --params={parameter}=FOLDER."
    if not path.is_absolute() and len(path.parts) == 2 and not path.parent.is_dir():
        text += f" For a dataset of the Hugging Face hub: --params={parameter}={tables.HUB}{path}."
    if parameter == "data.path":
        text += f" To draw the default dataset:\n{Command.current().without('data.path').for_pipeline('starter')}"
    return text


def _nothing_found(path: Path, limits: Limits, parameter: str, layouts: Collection[str]) -> str:
    """Says that no layout fits, what is there, and what was looked for."""
    names = sorted(islice(limits.walk(path), _MOST_NAMES)) if path.is_dir() else [path.name]
    kinds = Counter(PurePath(name).suffix.lower() or "without suffix" for name in names)
    has = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(5)) or "no files"
    image = next((PurePath(name).name for name in names if is_image_name(name)), None)
    hint = f" No image has a caption: for {image} there is no {folders.caption_name(image)}." if image else ""
    tried = "".join(f"\n  {name}: {LAYOUTS[name].files}" for name in layouts)
    return f"{parameter}: no records found in {path}, which has {has}.{hint} Looked for:{tried}"
