"""Edits of drawn shapes: a source, an instruction, and the resulting target.

A picture shows no object, one, or two at opposite positions. Recolouring, moving and resizing change the only object;
when an object is added or removed, there may be a second one, which stays. Everything that an edit does not change is
drawn with the same position and size in source and target.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from PIL import Image

from visual_grpo.starter.shapes.draw import Jitter, draw_scene
from visual_grpo.starter.shapes.world import CHANGES, COMBINATIONS, OPPOSITE, VOCABULARY, Combination

_BESIDE_ANOTHER = 0.5
"""Probability that there is a second object when one is added or removed, if its position allows it."""
_DIRECTIONS: Mapping[str, str] = {
    "left": "to the left",
    "right": "to the right",
    "top": "to the top",
    "bottom": "to the bottom",
    "center": "to the center",
}


@dataclass(frozen=True, kw_only=True)
class Edit:
    """An edit that turns an object from ``before`` into ``after``."""

    kind: str
    """One of `world.EDITS`."""
    before: Combination | None
    """None if the edit adds the object."""
    after: Combination | None
    """None if the edit removes the object."""
    other: Combination | None = None
    """A second, unchanged object at the opposite position."""

    @property
    def subject(self) -> Combination:
        """The edited object as in the target; a removed object as in the source."""
        subject = self.after or self.before
        assert subject is not None
        return subject

    @property
    def instruction(self) -> str:
        if self.kind == "add":
            return f"add {self.subject.prompt}"
        if self.kind == "remove":
            return f"remove the {self.subject.shape}"
        if self.kind == "move":
            return f"move it {_DIRECTIONS[self.subject.position]}"
        return f"make it {getattr(self.subject, CHANGES[self.kind])}"

    @property
    def group(self) -> str:
        """Description of the source and the instruction: drawings of the same edit must go to the same split."""
        shown = " and ".join(thing.prompt for thing in (self.before, self.other) if thing is not None)
        return f"{shown or 'nothing'}: {self.instruction}"

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata that the reward ``shapes`` reads."""
        other = None if self.other is None else asdict(self.other)
        return {**asdict(self.subject), "edit": self.kind, "other": other}


def random_edit(kind: str, subject: Combination, rng: random.Random) -> Edit:
    """A random edit of ``subject`` of the given kind, for additions and removals possibly with a second object."""
    if kind in CHANGES:
        attribute = CHANGES[kind]
        words = [word for word in VOCABULARY[attribute] if word != getattr(subject, attribute)]
        return Edit(kind=kind, before=subject, after=replace(subject, **{attribute: rng.choice(words)}))
    other = None
    if subject.position in OPPOSITE and rng.random() < _BESIDE_ANOTHER:
        # "Remove the circle" must be unambiguous.
        others = [thing for thing in COMBINATIONS if kind == "add" or thing.shape != subject.shape]
        other = replace(rng.choice(others), position=OPPOSITE[subject.position])
    added = kind == "add"
    return Edit(kind=kind, before=None if added else subject, after=subject if added else None, other=other)


def draw_edit(edit: Edit, height: int, width: int, rng: random.Random) -> tuple[Image.Image, Image.Image]:
    """Draws source and target."""
    subject_jitter, other_jitter = Jitter.draw(rng), Jitter.draw(rng)

    def scene(subject: Combination | None) -> Image.Image:
        objects = [(subject, subject_jitter), (edit.other, other_jitter)]
        return draw_scene([(thing, jitter) for thing, jitter in objects if thing is not None], height, width)

    return scene(edit.before), scene(edit.after)


def instructions() -> list[str]:
    """All distinct instructions in a fixed order, for the training of the tokenizer."""
    subjects = list(COMBINATIONS)
    changes = [Edit(kind=kind, before=thing, after=thing) for kind in CHANGES for thing in subjects]
    added = [Edit(kind="add", before=None, after=thing) for thing in subjects]
    removed = [Edit(kind="remove", before=thing, after=None) for thing in subjects]
    return list(dict.fromkeys(edit.instruction for edit in (*changes, *added, *removed)))
