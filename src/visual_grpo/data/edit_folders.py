"""Finds the images to edit in folders, as trainers of editing models lay them out.

``source/a.png`` (or control, reference, input; source_1 and source_2 of two) is edited to ``a.png`` or ``*/a.png``,
``source/cats/a.png`` to ``cats/a.png`` or ``*/cats/a.png``; ``source/a_0.png`` and ``source/a_1.png`` are two of one
target.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from visual_grpo.data.record import Rejected

_FOLDER = re.compile(r"(sources?|controls?|references?|inputs?)(_?(images?|path))?_?\d*")
"""Names of folders, in lower case, with the images to edit; the images beside them are targets."""
_NUMBERED = re.compile(r"(.*)_(\d+)", re.DOTALL)
Name = tuple[str, str]
"""A folder of sources, and the path of an image below it without suffix."""


class EditSources:
    """The ``sources`` of each of the ``targets``: paths of images relative to the folder of captions."""

    def __init__(self, sources: Iterable[str], targets: Iterable[str]) -> None:
        named = _named(sources)
        folders = _in_order({folder for folder, _ in named})
        self.seconds = [f"{other} beside {first}" for first, *others in named.values() for other in others]
        """Sources of the same name as another, which is used."""
        self._names = _names_of_targets(targets, folders, named)
        self._named = {name: first for name, (first, *_) in named.items()}
        self._numbered = _numbered(self._named, {name for names in self._names.values() for name in names})
        self._first: dict[str, int] = {}
        """Folder -> the number that its numbered sources begin with."""
        for (folder, _), ((number, _), *_) in self._numbered.items():
            self._first[folder] = min(self._first.get(folder, number), number)
        claimed = {image for names in self._names.values() for name in names for image in self._all(name)}
        self.unused = sorted({*self._named.values()} - claimed)
        """Sources that no target has the name of."""

    def has(self, target: str) -> bool:
        return any(map(self._all, self._names[target]))

    def of(self, target: str) -> list[str]:
        """Returns the sources of a target. Raises `Rejected` where a folder has none, or its numbers are unclear."""
        return [image for name in self._names[target] for image in self._of_name(name)]

    def _all(self, name: Name) -> list[str]:
        one, series = self._named.get(name), self._numbered.get(name, [])
        return ([] if one is None else [one]) + [image for _, image in series]

    def _of_name(self, name: Name) -> list[str]:
        folder, stem = name
        series = self._numbered.get(name, [])
        if (one := self._named.get(name)) is not None:
            if series:
                message = f"{one} has no number, and {', '.join(image for _, image in series)} beside it has one"
                remedy = f"Number every source of a target ({stem}_0, {stem}_1, ...), or none"
                raise Rejected("ambiguous_source", message, remedy)
            return [one]
        if not series:
            message = f"there is no image of the same name in {folder} ({stem}.png, .jpg, ...)"
            remedy = f"Add it to {folder}, or write records.jsonl with the source_image of each record"
            raise Rejected("missing_source", message, remedy)
        numbers, images = zip(*series, strict=True)
        first = self._first[folder]
        if numbers != (*range(first, first + len(numbers)),):
            message = f"the sources in {folder} are not numbered from {first} without a gap: {', '.join(images)}"
            raise Rejected("missing_source", message, "Add the missing ones, or remove the record")
        return [*images]


def _named(sources: Iterable[str]) -> dict[Name, list[str]]:
    """Returns the images by name; those of one name differ in their suffix."""
    named: dict[Name, list[str]] = {}
    for image in sorted(sources):
        if (folder := folder_of(image)) is not None:
            named.setdefault((folder, _below(folder, image)), []).append(image)
    return named


def folder_of(image: str) -> str | None:
    """Returns the folder of sources that an image lies in, with its path; None for a target."""
    parents = list(PurePosixPath(image).parents)[:-1]
    return next((str(each) for each in parents if is_source_folder(each.name)), None)


def is_source_folder(name: str) -> bool:
    return _FOLDER.fullmatch(name.lower()) is not None


def _in_order(folders: Iterable[str]) -> list[str]:
    """Sorts source_2 before source_10, and references, which are not what is edited, last."""
    return sorted(folders, key=lambda each: ("reference" in PurePosixPath(each).name.lower(), len(each), each))


def _names_of_targets(targets: Iterable[str], folders: Sequence[str], named: Iterable[Name]) -> dict[str, list[Name]]:
    """Returns the names of each target's sources, one for each folder of sources beside the target or above."""
    divided = {(folder, name.partition("/")[0]) for folder, name in named if "/" in name}

    def name_in(folder: str, target: str) -> Name:
        name = _below(PurePosixPath(folder).parent, target)
        first, _, rest = name.partition("/")
        return folder, rest if rest and (folder, first) not in divided else name

    return {
        target: [
            name_in(folder, target)
            for folder in folders
            if PurePosixPath(target).is_relative_to(PurePosixPath(folder).parent)
        ]
        for target in targets
    }


def _numbered(named: Mapping[Name, str], own: set[Name]) -> dict[Name, list[tuple[int, str]]]:
    """Returns by the name without a number the numbers and images of sources that no target has the very name of."""
    numbered: dict[Name, list[tuple[int, str]]] = {}
    for (folder, name), image in named.items():
        if (folder, name) not in own and (found := _NUMBERED.fullmatch(name)) is not None:
            numbered.setdefault((folder, found[1]), []).append((int(found[2]), image))
    return {name: sorted(images) for name, images in numbered.items()}


def _below(folder: str | PurePosixPath, image: str) -> str:
    return str(PurePosixPath(image).relative_to(folder).with_suffix(""))
