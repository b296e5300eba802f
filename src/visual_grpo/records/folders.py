"""Records in folders of files: prompts with numbered images, captioned images, images with masks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path, PurePath, PurePosixPath

from visual_grpo.config import Task
from visual_grpo.errors import UserError, counted
from visual_grpo.records.guard import Guard, is_image_name, open_text
from visual_grpo.records.raw import Item, Note, Place, RawRecord, Rejected

TARGETS = "target_images"
IMAGES, MASKS = "images", "masks"


def find_prompts(path: Path, guard: Guard) -> Path | None:
    """The file itself, or ``prompts.txt`` in the folder."""
    file = path / "prompts.txt" if path.is_dir() else path
    return file if file.suffix.lower() == ".txt" and file.is_file() else None


def read_prompts(path: Path, guard: Guard, task: Task) -> Iterator[Item]:
    """Yields one item for each line that is neither blank nor begins with ``#``.

    With a folder ``target_images``, the image n belongs to line n, from 0, and every prompt must have one.

    Raises:
        UserError: comments among lines with images, of which nobody knows whether they are counted.
    """
    folder = path.parent / TARGETS
    targets = _numbered(folder) if folder.is_dir() else None
    index = 0
    with open_text(path) as lines:
        for number, line in enumerate(lines, 1):
            if line.lstrip().startswith("#"):
                if targets:
                    raise UserError(
                        f"{path}, line {number}: lines that begin with # cannot stand among prompts with {TARGETS}."
                        " Remove them, and number the images from 0 in the order of the lines."
                    )
                continue
            if line.strip() or index in (targets or ()):
                place = Place(path.name, number)
                if targets is not None and index not in targets:
                    remedy = "Add it, or remove the prompt and renumber the images"
                    message = f"there is no image {TARGETS}/{index}.png, .jpg, ..."
                    yield Rejected("missing_target", message, remedy, place, str(index))
                else:
                    target = targets[index] if targets else None
                    yield RawRecord(place=place, folder=folder, id=str(index), prompt=line, target_image=target)
            index += 1
    if unused := sum(number >= index for number in targets or ()):
        yield Note(f"{unused} images in {TARGETS} have a number of {index} or more: lines are counted from 0")


def _numbered(folder: Path) -> dict[int, str]:
    """Names of image files by the number that they are named after: ``7.png`` and ``007.jpg`` by 7."""
    found: dict[int, str] = {}
    for name in sorted(path.name for path in folder.iterdir()):
        stem = PurePath(name).stem
        if is_image_name(name) and stem.isascii() and stem.isdigit() and len(stem) < 20:
            if int(stem) in found:
                raise UserError(f"{folder} has {found[int(stem)]} and {name}, of one number. Keep one of them.")
            found[int(stem)] = name
    return found


def find_captions(path: Path, guard: Guard) -> Path | None:
    """The folder, if at least one image below it has a caption: ``cat.jpg`` and ``cat.txt``."""
    images = filter(is_image_name, guard.walk(path) if path.is_dir() else ())
    return path if any((path / caption_name(name)).is_file() for name in images) else None


def read_captions(path: Path, guard: Guard, task: Task) -> Iterator[Item]:
    """Yields one item for each image; an image without a caption is rejected."""
    ignored: list[str] = []
    for _, group in groupby(guard.walk(path), key=lambda name: name.rpartition("/")[0]):
        names = list(group)
        images = list(filter(is_image_name, names))
        for image in images:
            place = Place(image)
            try:
                yield RawRecord(place=place, folder=path, prompt=_read_caption(path, image, guard), target_image=image)
            except Rejected as rejected:
                yield rejected.at(place)
        ignored += sorted({*names} - {*images, *map(caption_name, images)})
    if ignored:
        yield Note(f"ignored {counted(len(ignored), 'file')} beside images and their captions, such as {ignored[0]}")


def caption_name(image: str) -> str:
    return str(PurePosixPath(image).with_suffix(".txt"))


def _read_caption(root: Path, image: str, guard: Guard) -> str:
    name = caption_name(image)
    if not (root / name).is_file():
        remedy = f"Write its prompt to {name.rpartition('/')[2]}"
        raise Rejected("empty_prompt", "the image has no caption", remedy)
    return guard.read_text(root / name, f"the caption {name}")


def find_masks(path: Path, guard: Guard) -> Path | None:
    """The folder, if it has folders of images and masks."""
    return path if all((path / name).is_dir() for name in (IMAGES, MASKS)) else None


def read_masks(path: Path, guard: Guard, task: Task) -> Iterator[Item]:
    """Yields a query for each mask: ``masks/THING/a.png`` asks for THING in ``images/a.*``, and ``masks/a.png`` for
    what ``images/a.txt`` or ``masks/a.txt`` says."""
    images: dict[str, str] = {}
    for name in filter(is_image_name, guard.walk(path / IMAGES)):
        images.setdefault(str(PurePosixPath(name).with_suffix("")), name)
    used = set()
    for name in filter(is_image_name, guard.walk(path / MASKS)):
        stem = str(PurePosixPath(name).with_suffix(""))
        thing, _, below = stem.partition("/")
        place = Place(f"{MASKS}/{name}")
        image = images.get(stem) or images.get(below)
        if image is None:
            remedy = f"Add {IMAGES}/{stem}.png, or remove the mask"
            yield Rejected("missing_source", f"there is no image of the same name in {IMAGES}", remedy, place)
            continue
        used.add(image)
        try:
            query = thing.replace("_", " ") if stem not in images else _query(path, image, name, guard)
        except Rejected as rejected:
            yield rejected.at(place)
            continue
        source, mask = f"{IMAGES}/{image}", f"{MASKS}/{name}"
        yield RawRecord(place=place, folder=path, prompt=query, source_images=source, target_image=mask)
    if unused := [name for name in images.values() if name not in used]:
        yield Note(f"{len(unused)} images without a mask were ignored, such as {IMAGES}/{unused[0]}")


def _query(path: Path, image: str, mask: str, guard: Guard) -> str:
    for folder, name in ((MASKS, mask), (IMAGES, image)):
        if (path / folder / caption_name(name)).is_file():
            return _read_caption(path / folder, name, guard)
    remedy = f"Write it to {MASKS}/{caption_name(mask)}, or move the mask to {MASKS}/THING/{mask}"
    raise Rejected("empty_prompt", "nothing says what the mask shows", remedy)
