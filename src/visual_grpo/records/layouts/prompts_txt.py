"""``prompts.txt``, one prompt on each line, with ``target_images/0.png`` ... next to it.

Line n (from 0) belongs to image n. Lines that start with ``#`` are comments. Blank lines separate prompts; they are
counted, so that they do not shift the images of the lines below. One whose image exists lacks its prompt. Whether
comments are counted too depends on the images: an image must not go to another prompt because its owner counted
differently. Where the images fit neither way, nothing is guessed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from visual_grpo.errors import UserError
from visual_grpo.records.files import is_image_name, is_system_file, missing_file
from visual_grpo.records.guard import Guard
from visual_grpo.records.layouts.numbered import NumberedFiles
from visual_grpo.records.raw import Item, Note, Place, RawRecord, Rejected
from visual_grpo.records.text import Line, read_lines

LOOKS_FOR = "prompts.txt with a prompt on each line and, where you have them, target_images/0.png, 1.png, ..."

TARGETS = "target_images"


def find(path: Path, guard: Guard) -> Path | None:
    """The file itself, or ``prompts.txt`` in the folder."""
    if path.is_dir():
        path = path / "prompts.txt"
    return path if path.suffix.lower() == ".txt" and path.is_file() else None


def missing(path: Path, names: Sequence[str]) -> str:
    """Why `find` found nothing; ``names`` are of the files below the folder."""
    return missing_file("prompts.txt", path, names)


def count(path: Path, guard: Guard) -> int:
    """Prompts, for the progress bar; next to images a blank line may be one that is missing."""
    skips_blank = not (path.parent / TARGETS).is_dir()
    lines = (line for line in read_lines(path, guard.max_record_bytes) if not _is_comment(line.text))
    return sum(not (skips_blank and _is_blank(line)) for line in lines)


def read(path: Path, guard: Guard) -> Iterator[Item]:
    """Yields one item for each line that is neither a comment nor a blank line without an image.

    Without a folder ``target_images`` no record has a target; with the folder, every record must have a target.
    """
    folder = path.parent / TARGETS
    with NumberedFiles(_image_names(folder)) as targets:
        counts_comments = folder.is_dir() and _counts_comments(path, guard, targets)
        index = comments = 0
        for line in read_lines(path, guard.max_record_bytes):
            if _is_comment(line.text):
                comments += 1
                index += counts_comments
                continue
            if _is_blank(line) and not targets.named(index):
                index += 1
                continue
            place = Place(path.name, line.number)
            try:
                prompt = line.checked()
                target = _target(targets, index) if folder.is_dir() else None
            except Rejected as rejected:
                yield rejected.at(place, str(index))
            else:
                yield RawRecord(place=place, folder=folder, id=str(index), prompt=prompt, target_image=target)
            index += 1
        if counts_comments:
            yield Note(
                f"the {comments} lines of {path.name} that begin with # are comments, and the images in {TARGETS} are"
                " numbered with them: image n belongs to line n, from 0"
            )
        if unused := targets.count_from(index):
            yield Note(
                f"{unused} images in {TARGETS} have a number of {index} or more, but {path.name} has prompts"
                f" 0 to {index - 1}; numbers start at 0"
            )


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")


def _is_blank(line: Line) -> bool:
    return line.too_long is None and not line.text.strip()


def _counts_comments(path: Path, guard: Guard, targets: NumberedFiles) -> bool:
    """Whether the images are numbered by all lines: fewer prompts lack theirs then or, if none does, none is left over.

    Raises:
        UserError: as many prompts lack theirs either way, but not the same; or none lacks its own by the number of the
            prompt, but images are left over, and some lack theirs by line.
    """
    lines = prompts = lacking_by_prompt = lacking_by_line = 0
    for line in read_lines(path, guard.max_record_bytes):
        lines += 1
        if not _is_comment(line.text):
            if not _is_blank(line):  # It may have no image either way.
                lacking_by_prompt += not targets.named(prompts)
                lacking_by_line += not targets.named(line.number - 1)
            prompts += 1
    if prompts == lines:
        return False
    left_over = targets.count_from(prompts)
    if lacking_by_prompt == lacking_by_line > 0:
        raise _unclear(path, f"{lacking_by_prompt} images missing")
    if lacking_by_line > lacking_by_prompt == 0 and left_over:
        # Such as a headline above prompts of which one has been commented out.
        raise _unclear(path, f"{left_over} more images than prompts")
    if lacking_by_prompt != lacking_by_line:
        return lacking_by_line < lacking_by_prompt
    return left_over > 0


def _unclear(path: Path, what: str) -> UserError:
    return UserError(
        f"{path}: with lines that begin with #, and {what} in {TARGETS}, it cannot be told which image is of which"
        " line. Remove these lines, and number the images from 0 in the order of the lines."
    )


def _image_names(folder: Path) -> Iterator[str]:
    if folder.is_dir():
        with os.scandir(folder) as entries:
            yield from (e.name for e in entries if is_image_name(e.name) and not is_system_file(e.name))


def _target(targets: NumberedFiles, index: int) -> str:
    names = targets.named(index)
    if not names:
        raise Rejected(
            "missing_target",
            f"there is no image {TARGETS}/{index}.png, .jpg, ...",
            "Add it, or remove the prompt and renumber the images",
        )
    if len(names) > 1:
        raise Rejected(
            "ambiguous_target",
            f"{TARGETS} has several images with number {index}: {', '.join(names)}",
            "Keep one of them",
        )
    return names[0]
