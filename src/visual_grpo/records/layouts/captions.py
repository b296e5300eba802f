"""Images with a caption file of the same name: ``cat.jpg`` and ``cat.txt``, in a folder and its subfolders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path, PurePosixPath

from visual_grpo.errors import counted
from visual_grpo.records.files import is_image_name, is_left_out, left_out, walk
from visual_grpo.records.guard import Guard
from visual_grpo.records.on_disk import sorted_on_disk
from visual_grpo.records.raw import Item, Note, Place, RawRecord, Rejected
from visual_grpo.records.text import read_text

LOOKS_FOR = "images with a caption of the same name, such as cat.jpg with cat.txt"

_SHOWN = 5


def find(path: Path, guard: Guard) -> Path | None:
    """The folder, if at least one image below it has a caption."""
    if not path.is_dir():
        return None
    images = (name for name in walk(path, guard) if is_image_name(name))
    return path if any((path / _caption_name(name)).is_file() for name in images) else None


def missing(path: Path, names: Sequence[str]) -> str:
    """Why `find` found nothing; ``names`` are of the files below the folder."""
    if not path.is_dir():
        return "the path is a file, not a folder"
    images = [name for name in names if is_image_name(name)]
    if not images:
        return "there are no images"
    example = images[0].rpartition("/")[2]
    return f"{counted(len(images), 'image')}, none with a caption: for {example} there is no {_caption_name(example)}"


def count(path: Path, guard: Guard) -> int:
    return sum(is_image_name(name) for name in walk(path, guard))


def read(path: Path, guard: Guard) -> Iterator[Item]:
    """Yields one item for each image, in the order of their paths; an image without a caption is rejected."""
    without_image, others = _Ignored(), _Ignored()
    names = sorted_on_disk(_sort_key(name) for name in walk(path, guard))
    for _, group in groupby((key.split("\0") for key in names), key=lambda key: key[0]):
        stem_names = ["".join(key) for key in group]
        if is_left_out(stem_names[0]):
            yield left_out(stem_names[0], path, guard)
            continue
        images = [name for name in stem_names if is_image_name(name)]
        captions = [name for name in stem_names if _is_text(name)]
        yield from (_record(path, image, bool(captions), guard) for image in images)
        if not images:
            without_image.add(captions)
        others.add([name for name in stem_names if not (is_image_name(name) or _is_text(name))])
    if without_image.count:
        yield Note(f".txt files without an image of the same name were ignored: {without_image}")
    if others.count:
        yield Note(f"files that are neither images nor captions were ignored: {others}")


class _Ignored:
    """Names of files, of which only the first are kept."""

    def __init__(self) -> None:
        self.count = 0
        self._first: list[str] = []

    def add(self, names: Sequence[str]) -> None:
        self.count += len(names)
        self._first += names[: _SHOWN - len(self._first)]

    def __str__(self) -> str:
        more = self.count - len(self._first)
        return ", ".join(self._first) + (f" and {more} more" if more else "")


def _sort_key(name: str) -> str:
    """Stem and suffix separated by a NUL, so that files with the same stem are adjacent."""
    if is_left_out(name):
        return f"{name}\0"
    path = PurePosixPath(name)
    return f"{path.with_suffix('')}\0{path.suffix}"


def _is_text(name: str) -> bool:
    return name.endswith(".txt")


def _caption_name(image: str) -> str:
    return str(PurePosixPath(image).with_suffix(".txt"))


def _record(root: Path, image: str, captioned: bool, guard: Guard) -> Item:
    place = Place(image)
    try:
        if not captioned:
            raise Rejected(
                "empty_prompt",
                "the image has no caption",
                f"Write its prompt to {_caption_name(image).rpartition('/')[2]}",
            )
        name = _caption_name(image)
        guard.check_inside(root / name, f"the caption {name}")
        guard.check_ordinary(root / name, f"the caption {name}")
        caption = read_text(root / name, guard.max_record_bytes)
    except Rejected as rejected:
        return rejected.at(place)
    return RawRecord(place=place, folder=root, prompt=caption, target_image=image)
