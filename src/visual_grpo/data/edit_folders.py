"""Finds the images to edit in folders, as trainers of editing models lay them out.

``source/a.png`` (or control, reference, input; source_1 and source_2 of two) is edited to ``a.png`` or ``*/a.png``,
``source/cats/a.png`` to ``cats/a.png`` or ``*/cats/a.png``; ``source/a_0.png`` and ``source/a_1.png`` are two of one
target.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import PurePosixPath

from visual_grpo.data.record import Rejected, stem_of

_FOLDER = re.compile(r"(sources?|controls?|references?|inputs?)(_?(images?|path))?_?\d*")
"""Names of folders, in lower case, with the images to edit; the images next to them are targets."""
_NUMBERED, _NO_NUMBER = re.compile(r"(.*)_(\d+)", re.DOTALL), -1
Name = tuple[str, str]
"""A folder of sources, and the path of an image below it without suffix."""


class EditSources:
    """The sources of each of the ``targets``; ``sources``: image -> its `folder_of`, both relative to the dataset's."""

    def __init__(self, sources: Mapping[str, str], targets: Collection[str]) -> None:
        images: dict[Name, str] = {}
        self.seconds: list[str] = []
        """Sources that are not used, since a source of the same name is."""
        for image, folder in sorted(sources.items()):
            if images.setdefault((folder, _below(folder, image)), image) != image:
                self.seconds.append(image)
        self._names = _names_of_targets(targets, images)
        asked = {name for names in self._names.values() for name in names}
        self._series: dict[Name, list[tuple[int, str]]] = {}
        """Numbers and images by the name without the number, which belongs to a name that a target asks for."""
        for (folder, name), image in images.items():
            found = None if (folder, name) in asked else _NUMBERED.fullmatch(name)
            stem, number = (name, _NO_NUMBER) if found is None else (found[1], int(found[2]))
            self._series.setdefault((folder, stem), []).append((number, image))
        self.unused = sorted(image for name in {*self._series} - asked for _, image in self._series[name])
        """Sources whose name no target has."""
        numbers = ((name[0], n) for name in asked for n, _ in self._series.get(name, ()) if n != _NO_NUMBER)
        self._first = dict(sorted(numbers, reverse=True))
        """Folder -> the least number in it, with which the series of every target begins."""

    def has(self, target: str) -> bool:
        return any(name in self._series for name in self._names[target])

    def of(self, target: str) -> list[str]:
        """Returns the sources of a target. Raises `Rejected` where a folder has none, or its numbers are unclear."""
        return [image for folder, name in self._names[target] for image in self._of_name(folder, name)]

    def _of_name(self, folder: str, name: str) -> list[str]:
        series = sorted(self._series.get((folder, name), ()))
        numbers, images = [number for number, _ in series], [image for _, image in series]
        if not images:
            message = f"there is no image of the same name in {folder} ({name}.png, .jpg, ...)"
            remedy = f"Add it to {folder}, or write records.jsonl with the source_image of each record"
            raise Rejected("missing_source", message, remedy)
        if numbers == [_NO_NUMBER]:
            return images
        if _NO_NUMBER in numbers:
            message = f"{images[0]} has no number, and {', '.join(images[1:])} next to it has one"
            remedy = f"Number every source of a target ({name}_0, {name}_1, ...), or none"
            raise Rejected("ambiguous_source", message, remedy)
        first = self._first[folder]
        if numbers != [*range(first, first + len(numbers))]:
            message = f"the sources in {folder} are not numbered from {first} without a gap: {', '.join(images)}"
            raise Rejected("missing_source", message, "Add the missing ones, or remove the record")
        return images


def folder_of(image: str) -> str | None:
    """Returns the folder of sources that an image lies in, with its path; None for a target."""
    parents = list(PurePosixPath(image).parents)[:-1]
    return next((str(each) for each in parents if is_source_folder(each.name)), None)


def is_source_folder(name: str) -> bool:
    return _FOLDER.fullmatch(name.lower()) is not None


def _names_of_targets(targets: Iterable[str], named: Collection[Name]) -> dict[str, list[Name]]:
    """Returns the names of each target's sources, one for each folder of sources next to the target or above."""
    # source_2 before source_10, and references, which are not what is edited, last.
    order = {("reference" in PurePosixPath(folder).name.lower(), len(folder), folder) for folder, _ in named}
    beside: dict[PurePosixPath, list[tuple[bool, int, str]]] = {}
    for each in order:
        beside.setdefault(PurePosixPath(each[2]).parent, []).append(each)
    divided = {(folder, name.partition("/")[0]) for folder, name in named if "/" in name}
    names: dict[str, list[Name]] = {target: [] for target in targets}
    for target, own in names.items():
        found = ((each, above) for above in PurePosixPath(target).parents for each in beside.get(above, ()))
        for (_, _, folder), above in sorted(found):
            name = _below(above, target)
            first, _, rest = name.partition("/")
            own.append((folder, rest if rest and (folder, first) not in divided else name))
    return names


def _below(folder: str | PurePosixPath, image: str) -> str:
    return stem_of(str(PurePosixPath(image).relative_to(folder)))
