"""Records in folders of files: numbered or captioned images, images with masks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePath, PurePosixPath
from typing import NamedTuple

from visual_grpo.common.errors import UserError, counted
from visual_grpo.common.machine_errors import is_machine_error
from visual_grpo.config import DataConfig
from visual_grpo.data.edit_folders import EditSources, folder_of, is_source_folder
from visual_grpo.data.record import (
    LFS_REMEDY,
    Item,
    Limits,
    Note,
    Place,
    Record,
    Rejected,
    find_file,
    is_image_name,
    is_lfs_pointer,
    is_video_name,
    open_text,
    stem_of,
)
from visual_grpo.data.splits import usual_name

TARGETS = "target_images"
IMAGES, MASKS = "images", "masks"
_LISTS = {"prompt": ("prompt.txt", "prompts.txt", "caption.txt", "captions.txt")} | {
    "target": ("video.txt", "videos.txt", "image.txt", "images.txt")
}
"""Names of a list of prompts and of the list of their pictures or videos, a path a line, as finetrainers has them
(finetrainers/data/dataset.py)."""
CAPTIONS = (".txt", ".caption", ".TXT", ".CAPTION")
"""Suffixes of captions; the first that is found counts."""
_REGULARISATION = frozenset({"reg", "regularization", "regularisation"})
"""Names of folders, in lower case, whose pictures other trainers take to keep what the model knows of a class."""
_REPEATS = re.compile(r"\d{1,3}_\D")
"""The beginning of a folder's name in kohya's layout, such as ``10_dog``."""


def find_prompts(path: Path, limits: Limits) -> Path | None:
    files = [path]
    if path.is_dir():
        names = ("prompts.txt", *_LISTS["prompt"]) if _list_of_targets(path) else ("prompts.txt",)
        files = [path / name for name in names]
    found = next((file for file in files if file.suffix.lower() == ".txt" and file.is_file()), None)
    if found is None and path.is_dir() and _split_lists(path):
        # Next to pictures, such files list them.
        return None if any(is_image_name(name) or is_video_name(name) for name in limits.walk(path)) else path
    return found


def _split_lists(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.glob("[!.]*.txt")) if usual_name(file.stem) and file.is_file()]


def read_prompts(path: Path, limits: Limits, data: DataConfig) -> Iterator[Item]:
    """Yields the prompts of a file, or of a folder's lists for each split (``train.txt``, ``test.txt``)."""
    if path.is_file():
        yield from _read_list(path, limits, data)
        return
    for file in _split_lists(path):
        limits.require_inside(file)
        for item in _read_list(file, limits, data):
            yield item if isinstance(item, Note) else replace(item, id=f"{file.stem}-{item.id}")


def _read_list(path: Path, limits: Limits, data: DataConfig) -> Iterator[Item]:
    """Yields a record for each line that is neither blank nor begins with ``#``.

    With a folder ``target_images``, image n belongs to line n, counted from 0, and every prompt must have one; with a
    list of files (`_LISTS`), that on line n. Raises UserError for comments among such lines, because they may or may
    not be counted, for images that seem to be counted from 1, for a list of a different length, and for images to edit
    next to the prompts, if nothing says which belong together.
    """
    if Path(data.path).is_dir():  # Who names the file means the file.
        _refuse_sources(path, data.parameter)
    targets, index = _targets_of_lines(path, limits), 0
    with open_text(path) as lines:
        for number, line in enumerate(lines, 1):
            place = Place(path.name, number)
            _refuse_table(path, number, line)
            if line.lstrip().startswith("#"):
                if targets.by_line:
                    raise UserError(
                        f"{path}, line {number}: lines that begin with # cannot stand among prompts with targets."
                        " Remove them, and number the targets from 0 in the order of the lines."
                    )
                yield Note("line", "taken as a comment: a prompt that begins with # needs records.jsonl", place)
                continue
            target = targets.by_line.get(index)
            if target is not None or (targets.folder is None and line.strip()):
                yield Record(
                    place=place,
                    folder=targets.folder or path.parent,
                    id=str(index),
                    prompt=line,
                    target_image=target,
                    caption=targets.listed,
                )
            elif line.strip():
                yield _without_target(path, targets, index).at(place, index)
            index += 1
    for number, name in targets.by_line.items():
        if number >= index:
            yield Note("image", "not used: no line has its number, counted from 0", Place(f"{TARGETS}/{name}"))


class _Targets(NamedTuple):
    folder: Path | None
    """The folder that the paths of the targets are relative to; None without targets."""
    by_line: Mapping[int, str]
    """The path of the target of each line, counted from 0."""
    listed: str | None = None
    """The list that has them."""


def _targets_of_lines(path: Path, limits: Limits) -> _Targets:
    """Finds the targets of the prompts in a file; `_LISTS` count for its own names only."""
    if (folder := path.parent / TARGETS).is_dir():
        return _Targets(folder, _numbered_images(folder, limits))
    listed = _list_of_targets(path.parent) if path.name in _LISTS["prompt"] else None
    if listed is None:
        return _Targets(None, {})
    limits.require_inside(listed)
    with open_text(listed) as names, open_text(path) as lines:
        targets = {number: name.strip() for number, name in enumerate(names) if name.strip()}
        last = max((number for number, line in enumerate(lines) if line.strip()), default=-1)
    if (count := max(targets, default=-1) + 1) != last + 1:
        message = f"{listed} has {counted(count, 'line')}, and {path.name} has {last + 1}"
        raise UserError(f"{message}. Put each file on the line of its prompt.")
    return _Targets(path.parent, targets, listed.name)


def _list_of_targets(folder: Path) -> Path | None:
    return next((folder / name for name in _LISTS["target"] if (folder / name).is_file()), None)


def _refuse_table(path: Path, number: int, line: str) -> None:
    name = re.split(r"[,;\t|]", line, maxsplit=1)[0].rstrip()
    if number <= 2 and is_image_name(name):  # The header and a row of a table, or a list of files.
        raise UserError(
            f"{path}, line {number}, begins with the name of an image, so this is a table or a list, and not a"
            " prompt on each line. Write metadata.csv, with file_name and text in its first line, next to the images."
        )


def _without_target(path: Path, targets: _Targets, index: int) -> Rejected:
    if targets.listed is not None:
        message = f"{targets.listed} has no file on this line"
        return Rejected("missing_target", message, "Add it, or remove the line in both files")
    if index == 0 and 1 in targets.by_line:
        raise UserError(
            f"{path}: images are counted from 0, and there is {TARGETS}/{targets.by_line[1]} but no image 0. If they"
            f" are numbered from 1, rename them or begin {path.name} with an empty line; if image 0 is missing, empty"
            " the first line."
        )
    message = f"there is no image {TARGETS}/{index}.png, .jpg, ..."
    return Rejected("missing_target", message, "Add it, or remove the prompt and renumber the images")


def _refuse_sources(path: Path, parameter: str) -> None:
    for folder in sorted(entry for entry in path.parent.iterdir() if is_source_folder(entry.name) and entry.is_dir()):
        if any(is_image_name(file.name) for file in folder.iterdir()):
            raise UserError(
                f"{path} has prompts, and {folder.name} next to it has images to edit, but nothing says which belong"
                " together. Write each prompt into a text file next to the target (target/cat.txt for target/cat.png"
                f" and {folder.name}/cat.png), or write records.jsonl. If they are not to be edited:"
                f" {parameter}={path}"
            )


def _numbered_images(folder: Path, limits: Limits) -> dict[int, str]:
    """Returns names of files of images (or videos) by their number: ``7.png`` and ``007.jpg`` by 7."""
    images: dict[int, str] = {}
    for name in sorted(path.name for path in folder.iterdir()):
        stem = PurePath(name).stem
        if limits.is_target(name) and stem.isascii() and stem.isdigit() and len(stem) < 20:
            if int(stem) in images:
                raise UserError(f"{folder} has {images[int(stem)]} and {name}, of one number. Keep one of them.")
            images[int(stem)] = name
    return images


def find_captions(path: Path, limits: Limits) -> Path | None:
    """Returns the folder if at least one image below it has a caption: ``cat.jpg`` and ``cat.txt``; where targets are
    videos, also ``cat.mp4``, or a folder of frames ``cat``."""
    images = _targets(path, limits) if path.is_dir() else ()
    return path if any(_caption_of(path, name) is not None for name in images) else None


def read_captions(path: Path, limits: Limits, data: DataConfig) -> Iterator[Item]:
    """Yields a record for each image; an image without a caption is rejected.

    The sources of an edit lie in folders of their own (`EditSources`), under the name of its target. Raises UserError
    if the task needs source images, but no folder holds them.
    """
    images, sources = _targets_and_sources(path, limits, data)
    for image in images:
        place, folders = Place(image), image.lower().split("/")[:-1]
        try:
            caption = _caption_of(path, image)
            if caption is None:
                raise _without_caption(path, image, sources, limits)
            prompt = _read_caption(path, caption, limits)
            edited = sources.of(image) if data.task == "i2i" or sources.has(image) else None
        except Rejected as rejected:
            yield rejected.at(place)
            continue
        if not _REGULARISATION.isdisjoint(folders):
            yield Note("picture", "meant for regularisation, which is not done: trained on like any other", place)
        if folders and _REPEATS.match(folders[-1]):
            yield Note("picture", "in a folder whose name has kohya's repeats: each counts once", place)
        yield Record(place=place, folder=path, prompt=prompt, source_images=edited, target_image=image, caption=caption)
    yield from (Note("source", "not used: no target has its name", Place(image)) for image in sources.unused)
    yield from (
        Note("source", "not used: a different source has the same name", Place(image)) for image in sources.seconds
    )


def _without_caption(path: Path, image: str, sources: EditSources, limits: Limits) -> Rejected:
    message, remedy = "it has no caption", f"Write its prompt to {PurePosixPath(image).with_suffix(CAPTIONS[0])}"
    if limits.videos and is_image_name(image) and (folder := image.rpartition("/")[0]):
        remedy += f" or, if it is a frame of a video, the video's prompt to {folder}{CAPTIONS[0]}"
    edited = sources.of(image) if sources.has(image) else []
    if other := next(filter(None, (_caption_of(path, source) for source in edited)), None):
        message += f"; {other} is next to the image to edit, where nothing reads it"
        remedy = f"Move it to {PurePosixPath(image).with_suffix(CAPTIONS[0])}, next to the target"
    return Rejected("empty_prompt", message, remedy)


def _targets_and_sources(path: Path, limits: Limits, data: DataConfig) -> tuple[list[str], EditSources]:
    """Yields targets with their sources. Unless the task is i2i, every picture with a caption is a target."""
    images, is_edit, beside = list(_targets(path, limits)), data.task == "i2i", dict[str, str]()
    for image in images:
        if (folder := folder_of(image)) is not None and (is_edit or _caption_of(path, image) is None):
            beside[image] = folder
    targets = [image for image in images if image not in beside]
    sources = EditSources(beside, targets)
    if is_edit and not beside:
        folders = ", ".join(sorted(entry.name for entry in path.iterdir() if entry.is_dir())) or "none"
        raise UserError(
            f"{path} has images with captions, but an edit (data.task=i2i) also needs the image to edit, and"
            f" nothing says which one that is (folders found: {folders}). Put it into a folder called source,"
            " under the name of its target (several: source_1, source_2), or write records.jsonl with prompt,"
            " source_image and target_image on each line."
        )
    return (targets, sources) if is_edit or any(map(sources.has, targets)) else (images, EditSources({}, images))


def _targets(path: Path, limits: Limits) -> Iterator[str]:
    """Yields pictures and videos; a folder with a caption next to it stands for the frames in it, unless there is a
    video of its name."""
    names, yielded = list(limits.walk(path)), set[str]()
    captioned = {name.rpartition(".")[0] for name in names if name.endswith(CAPTIONS)} if limits.videos else set()
    clips = {name.rpartition(".")[0] for name in names if is_video_name(name)}
    for name in filter(limits.is_target, names):
        target = parent if (parent := name.rpartition("/")[0]) in captioned else name
        if target in clips:
            continue
        if target not in yielded:
            yielded.add(target)
            yield target


def _caption_of(root: Path, image: str) -> str | None:
    stem = image if (root / image).is_dir() else str(PurePosixPath(image).with_suffix(""))
    found = (find_file(root, f"{stem}{suffix}") for suffix in CAPTIONS)
    return next((file.relative_to(root).as_posix() for file in found if file is not None), None)


def _read_caption(root: Path, name: str, limits: Limits) -> str:
    limits.check(root / name, f"the caption {name}")
    try:
        if is_lfs_pointer(root / name):
            raise Rejected("lfs_pointer", f"the caption {name} is a Git LFS pointer, not the text", LFS_REMEDY)
        return (root / name).read_text(encoding="utf-8-sig")
    except OSError as error:
        if is_machine_error(error):
            raise
        message = f"the caption {name} cannot be read ({error.strerror})"
        raise Rejected("unreadable_text", message, "Check the file and its permissions") from error
    except UnicodeDecodeError as error:
        message = f"the caption {name} cannot be read ({error})"
        raise Rejected("unreadable_text", message, "Save the file as UTF-8") from error


def find_masks(path: Path, limits: Limits) -> Path | None:
    return path if all((path / name).is_dir() for name in (IMAGES, MASKS)) else None


def read_masks(path: Path, limits: Limits, data: DataConfig) -> Iterator[Item]:
    """Yields a query for each mask.

    ``masks/THING/a.png`` asks for THING in ``images/a.*``; the query of ``masks/a.png`` is read from ``masks/a.txt``
    or ``images/a.txt``.
    """
    images: dict[str, str] = {}
    for name in filter(is_image_name, limits.walk(path / IMAGES)):
        if images.setdefault(stem_of(name), name) != name:
            yield Note("image", "not used: a different image has the same name", Place(f"{IMAGES}/{name}"))
    used = set()
    for name in filter(is_image_name, limits.walk(path / MASKS)):
        stem = stem_of(name)
        thing, _, below = stem.partition("/")
        place = Place(f"{MASKS}/{name}")
        try:
            image = images.get(stem) or images.get(below)
            if image is None:
                remedy = f"Add {IMAGES}/{below or stem}.png, or remove the mask"
                raise Rejected("missing_source", f"there is no image of the same name in {IMAGES}", remedy)
            used.add(image)
            caption = None if stem not in images else _query_file(path, image, name)
            query = thing.replace("_", " ") if caption is None else _read_caption(path, caption, limits)
        except Rejected as rejected:
            yield rejected.at(place)
            continue
        source, mask = f"{IMAGES}/{image}", f"{MASKS}/{name}"
        yield Record(place=place, folder=path, prompt=query, source_images=source, target_image=mask, caption=caption)
    for name in images.values():
        if name not in used:
            yield Note("image", "not used: no mask has its name", Place(f"{IMAGES}/{name}"))


def _query_file(path: Path, image: str, mask: str) -> str:
    for name in (f"{MASKS}/{mask}", f"{IMAGES}/{image}"):
        if (caption := _caption_of(path, name)) is not None:
            return caption
    text = PurePosixPath(mask).with_suffix(CAPTIONS[0])
    remedy = f"Write it to {MASKS}/{text}, or move the mask to {MASKS}/THING/{mask}"
    raise Rejected("empty_prompt", "nothing says what the mask shows", remedy)
