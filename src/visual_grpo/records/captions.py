"""Images with a caption file of the same name: ``cat.jpg`` and ``cat.txt``, in a folder and its subfolders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path, PurePosixPath

from visual_grpo.config import Task
from visual_grpo.records.guard import Guard, is_image_name
from visual_grpo.records.raw import Item, Note, Place, RawRecord, Rejected
from visual_grpo.records.text import read_text

_SHOWN = 5


def find_captions(path: Path, guard: Guard) -> Path | None:
    """The folder, if at least one image below it has a caption."""
    images = filter(is_image_name, guard.walk(path) if path.is_dir() else ())
    return path if any((path / caption_name(name)).is_file() for name in images) else None


def read_captions(path: Path, guard: Guard, task: Task) -> Iterator[Item]:
    """Yields one item for each image; an image without a caption is rejected."""
    refused: list[Rejected] = []
    unused: list[str] = []
    others: list[str] = []
    for _, group in groupby(guard.walk(path, refused), key=lambda name: name.rpartition("/")[0]):
        names = list(group)
        images = list(filter(is_image_name, names))
        captions = {caption_name(name) for name in images}
        yield from (_record(path, image, guard) for image in images)
        unused += (name for name in names if name.endswith(".txt") and name not in captions)
        others += (name for name in names if not (is_image_name(name) or name.endswith(".txt")))
    yield from refused
    if unused:
        yield Note(f".txt files without an image of the same name were ignored: {_first(unused)}")
    if others:
        yield Note(f"files that are neither images nor captions were ignored: {_first(others)}")


def caption_name(image: str) -> str:
    return str(PurePosixPath(image).with_suffix(".txt"))


def read_caption(root: Path, image: str, guard: Guard) -> str:
    """The caption of an image.

    Raises:
        Rejected: there is none, or it must not or cannot be read.
    """
    name = caption_name(image)
    guard.check_place(root / name, f"the caption {name}")
    if not (root / name).is_file():
        remedy = f"Write its prompt to {name.rpartition('/')[2]}"
        raise Rejected("empty_prompt", "the image has no caption", remedy)
    return read_text(root / name, guard.max_record_bytes)


def _record(root: Path, image: str, guard: Guard) -> Item:
    try:
        caption = read_caption(root, image, guard)
    except Rejected as rejected:
        return rejected.at(Place(image))
    return RawRecord(place=Place(image), folder=root, prompt=caption, target_image=image)


def _first(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
