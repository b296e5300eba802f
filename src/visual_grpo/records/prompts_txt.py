"""``prompts.txt``, one prompt on each line, with ``target_images/0.png`` ... next to it.

Line n (from 0) belongs to image n. Lines that start with ``#`` are comments. Blank lines separate prompts; they are
counted, so that they do not shift the images of the lines below. One whose image exists lacks its prompt. Whether
comments are counted too depends on the images: an image must not go to another prompt because its owner counted
differently. Where the images fit neither way, nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePath

from visual_grpo.config import Task
from visual_grpo.errors import UserError
from visual_grpo.records.guard import Guard, is_image_name, is_system_file
from visual_grpo.records.raw import Item, Note, Place, RawRecord, Rejected
from visual_grpo.records.text import check_line, read_lines

TARGETS = "target_images"

Numbered = dict[int, list[str]]
"""Names of image files by the number that they are named after: ``7.png`` and ``007.jpg`` by 7."""


def find_prompts(path: Path) -> Path | None:
    """The file itself, or ``prompts.txt`` in the folder."""
    if path.is_dir():
        path = path / "prompts.txt"
    return path if path.suffix.lower() == ".txt" and path.is_file() else None


def read_prompts(path: Path, guard: Guard, task: Task) -> Iterator[Item]:
    """Yields one item for each line that is neither a comment nor a blank line without an image.

    Without a folder ``target_images`` no record has a target; with the folder, every record must have a target.
    """
    folder = path.parent / TARGETS
    targets = _numbered(folder)
    counts_comments = folder.is_dir() and _counts_comments(path, targets)
    index = comments = 0
    for number, line in read_lines(path):
        if _is_comment(line):
            comments += 1
            index += counts_comments
            continue
        if line.strip() or index in targets:
            place = Place(path.name, number)
            try:
                check_line(line, guard.max_record_bytes)
                target = _target(targets, index) if folder.is_dir() else None
            except Rejected as rejected:
                yield rejected.at(place, str(index))
            else:
                yield RawRecord(place=place, folder=folder, id=str(index), prompt=line, target_image=target)
        index += 1
    if counts_comments:
        yield Note(
            f"the {comments} lines of {path.name} that begin with # are comments, and the images in {TARGETS} are"
            " numbered with them: image n belongs to line n, from 0"
        )
    if unused := _count_from(targets, index):
        yield Note(
            f"{unused} images in {TARGETS} have a number of {index} or more, but {path.name} has prompts"
            f" 0 to {index - 1}; numbers start at 0"
        )


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")


def _counts_comments(path: Path, targets: Numbered) -> bool:
    """True if the images are numbered by all lines: fewer prompts lack theirs then or, if none does, none is left over.

    Raises:
        UserError: as many prompts lack theirs either way, but not the same; or none lacks its own by the number of the
            prompt, but images are left over, and some lack theirs by line.
    """
    lines = prompts = lacking_by_prompt = lacking_by_line = 0
    for number, line in read_lines(path):
        lines += 1
        if not _is_comment(line):
            if line.strip():  # A blank line may have no image either way.
                lacking_by_prompt += prompts not in targets
                lacking_by_line += number - 1 not in targets
            prompts += 1
    if prompts == lines:
        return False
    left_over = _count_from(targets, prompts)
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


def _numbered(folder: Path) -> Numbered:
    found: Numbered = {}
    for name in sorted(path.name for path in folder.iterdir()) if folder.is_dir() else ():
        stem = PurePath(name).stem
        if is_image_name(name) and not is_system_file(name) and stem.isascii() and stem.isdigit() and len(stem) < 20:
            found.setdefault(int(stem), []).append(name)
    return found


def _count_from(targets: Numbered, number: int) -> int:
    return sum(len(names) for found, names in targets.items() if found >= number)


def _target(targets: Numbered, index: int) -> str:
    names = targets.get(index, [])
    if not names:
        message = f"there is no image {TARGETS}/{index}.png, .jpg, ..."
        raise Rejected("missing_target", message, "Add it, or remove the prompt and renumber the images")
    if len(names) > 1:
        message = f"{TARGETS} has several images with number {index}: {', '.join(names)}"
        raise Rejected("ambiguous_target", message, "Keep one of them")
    return names[0]
