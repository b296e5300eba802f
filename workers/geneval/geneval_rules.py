"""GenEval's rules (arXiv 2310.11513): is everything that a prompt names in the picture, as many, coloured and placed?

A task is a line of GenEval's evaluation_metadata.jsonl. Every entry of ``include`` must be met, none of ``exclude``.
Colours and places are looked at on the surest objects only, as many as are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CONFIDENCE = 0.3
"""An object counts if the detector is surer than this,"""
COUNTING_CONFIDENCE = 0.9
"""or than this in tasks of counting, where one object too many is as wrong as one too few."""
COUNTING = "counting"
MOST_OBJECTS = 16
"""Of a class, the surest."""
POSITION_MARGIN = 0.1
"""Share of both objects' sizes by which their centres must be apart before they are beside each other."""
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")

Box = tuple[float, float, float, float]
"""Left, top, right and bottom in pixels."""


class UnusableError(ValueError):
    """Metadata that is no task of GenEval."""


@dataclass(frozen=True)
class Found:
    """An object in the picture."""

    box: Box
    confidence: float
    mask: Any = None
    """Its pixels, bool [height, width]; None where only boxes are known."""


@dataclass(frozen=True)
class Wanted:
    """An entry of ``include``."""

    name: str
    count: int
    colour: str | None = None
    relation: str | None = None
    """Where the objects must be, as seen from those of the entry ``target``."""
    target: int = 0


@dataclass(frozen=True)
class Task:
    """What a picture must show."""

    include: tuple[Wanted, ...]
    exclude: tuple[Wanted, ...]
    confidence: float


@dataclass(frozen=True)
class Verdict:
    """How far a picture shows it."""

    correct: bool
    share: float
    """Of the requirements, those that are met, 0 to 1: each number, colour and place of ``include``, and each entry of
    ``exclude``, is one. 1 exactly where the picture is correct."""


def task_of(metadata: Mapping[str, Any], names: Sequence[str]) -> Task:
    """The task of a record's metadata.

    Args:
        names: the classes that the detector knows.

    Raises:
        UnusableError: there is none, or it asks for what cannot be judged.
    """
    include, exclude = (_entries(metadata, key, names) for key in ("include", "exclude"))
    if not include and not exclude:
        raise UnusableError("metadata must have include or exclude, as GenEval's evaluation_metadata.jsonl has it")
    if not isinstance(metadata.get("tag"), str):
        raise UnusableError(f"metadata tag must be a text such as {COUNTING}, got {metadata.get('tag')!r}")
    for number, wanted in enumerate(include):
        if wanted.relation is not None and not 0 <= wanted.target < number:
            raise UnusableError(f"position of {wanted.name} must name an earlier entry of include, got {wanted.target}")
    return Task(include, exclude, COUNTING_CONFIDENCE if metadata["tag"] == COUNTING else CONFIDENCE)


def _entries(metadata: Mapping[str, Any], key: str, names: Sequence[str]) -> tuple[Wanted, ...]:
    listed = metadata.get(key) or []
    if not isinstance(listed, list):
        raise UnusableError(f"metadata {key} must be a list, got {str(listed)[:100]}")
    return tuple(_entry(entry, key, names) for entry in listed)


def _entry(entry: Any, key: str, names: Sequence[str]) -> Wanted:
    if not isinstance(entry, dict):
        raise UnusableError(f"an entry of {key} must be an object with class and count, got {str(entry)[:100]}")
    name, count, colour, position = (entry.get(part) for part in ("class", "count", "color", "position"))
    if name not in names:
        raise UnusableError(f"class must be one of COCO's 80 as GenEval names them, got {name!r}")
    if not _whole(count) or count < 1:
        raise UnusableError(f"count of {name} must be a whole number of at least 1, got {count!r}")
    if colour is not None and colour not in COLOURS:
        raise UnusableError(f"color of {name} must be one of {', '.join(COLOURS)}, got {colour!r}")
    if position is None:
        return Wanted(name, count, colour)
    if not (isinstance(position, list) and len(position) == 2 and position[0] in RELATIONS and _whole(position[1])):
        raise UnusableError(f"position of {name} must be [one of {', '.join(RELATIONS)}, entry], got {position!r}")
    return Wanted(name, count, colour, *position)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def surest(found: Sequence[Found], confidence: float) -> list[Found]:
    """The objects of a class that count, surest first."""
    counting = [one for one in found if one.confidence > confidence]
    return sorted(counting, key=lambda one: -one.confidence)[:MOST_OBJECTS]


def judge(
    task: Task,
    found: Mapping[str, Sequence[Found]],
    colours_of: Callable[[str, Sequence[Found]], Sequence[str]],
) -> Verdict:
    """Holds what was found against a task.

    Args:
        found: for each class, the objects that the detector proposes, with any confidence.
        colours_of: of a class and some of its objects, one of `COLOURS` for each; asked only where it matters.
    """
    counted = {name: surest(own, task.confidence) for name, own in found.items()}
    met: list[bool] = []
    groups: list[Sequence[Found] | None] = []
    for wanted in task.include:
        objects = counted.get(wanted.name, [])[: wanted.count]
        own = list(_requirements(wanted, objects, groups, colours_of))
        groups.append(objects if all(own) else None)
        met += own
    met += [len(counted.get(unwanted.name, [])) < unwanted.count for unwanted in task.exclude]
    return Verdict(all(met), sum(met) / len(met))


def _requirements(
    wanted: Wanted,
    objects: Sequence[Found],
    groups: Sequence[Sequence[Found] | None],
    colours_of: Callable[[str, Sequence[Found]], Sequence[str]],
) -> list[bool]:
    """Number, colour and place, as far as they are asked for. One that cannot be looked at is not met."""
    met = [len(objects) == wanted.count]
    if wanted.colour is not None:
        met.append(met[0] and list(colours_of(wanted.name, objects)).count(wanted.colour) == wanted.count)
    if wanted.relation is not None:
        target = groups[wanted.target]
        met.append(
            all(met)
            and target is not None
            and all(wanted.relation in relations(one.box, other.box) for one in objects for other in target)
        )
    return met


def relations(box: Box, other: Box) -> set[str]:
    """Where ``box`` is as seen from ``other``: none to two of `RELATIONS`.

    The distance of the centres counts on each axis as far as it exceeds a tenth of both sizes; what is left must be
    more than half of the whole distance.
    """
    apart = [_centre(box, axis) - _centre(other, axis) for axis in (0, 1)]
    left = [
        math.copysign(max(abs(far) - POSITION_MARGIN * (_size(box, axis) + _size(other, axis)), 0.0), far)
        for axis, far in enumerate(apart)
    ]
    if all(abs(far) < 1e-3 for far in left):
        return set()
    distance = math.hypot(*apart)
    steps = zip(("left of", "above"), ("right of", "below"), left, strict=True)
    return {before if far < 0 else after for before, after, far in steps if abs(far) / distance > 0.5}


def _centre(box: Box, axis: int) -> float:
    return (box[axis] + box[axis + 2]) / 2


def _size(box: Box, axis: int) -> float:
    return abs(box[axis + 2] - box[axis])
