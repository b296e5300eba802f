"""Edits of drawn scenes: a source, an instruction, and the target that it asks for.

A scene holds nothing, one object, or two at opposite places. Recolouring, moving and resizing change a scene's
only object; adding and removing may have another object beside theirs, which stays. Everything that an edit
leaves alone is drawn in the same place and size in the source and in the target.
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
"""How often an object is added or removed beside another one, where its place allows it."""
_DIRECTIONS: Mapping[str, str] = {
    "left": "to the left",
    "right": "to the right",
    "top": "to the top",
    "bottom": "to the bottom",
    "center": "to the center",
}


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One edit of the object that it is about, from ``before`` to ``after``."""

    kind: str
    """One of `world.EDITS`."""
    before: Combination | None
    """None: the source does not show it yet."""
    after: Combination | None
    """None: the target shows it no more."""
    other: Combination | None = None
    """An object at the opposite place that stays."""

    @property
    def subject(self) -> Combination:
        """The object as the target shows it; if removed, as it was."""
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
        """The source in words and the instruction: drawings of one group must not be split."""
        shown = " and ".join(thing.prompt for thing in (self.before, self.other) if thing is not None)
        return f"{shown or 'nothing'}: {self.instruction}"

    @property
    def metadata(self) -> dict[str, Any]:
        """What `rewards.shapes` reads."""
        other = None if self.other is None else asdict(self.other)
        return {**asdict(self.subject), "edit": self.kind, "other": other}


def random_edit(kind: str, subject: Combination, rng: random.Random) -> Edit:
    """An edit of ``subject``; to add or remove it is one, of it or of it beside another object."""
    if kind in CHANGES:
        attribute = CHANGES[kind]
        words = [word for word in VOCABULARY[attribute] if word != getattr(subject, attribute)]
        return Edit(kind=kind, before=subject, after=replace(subject, **{attribute: rng.choice(words)}))
    other = None
    if subject.position in OPPOSITE and rng.random() < _BESIDE_ANOTHER:
        # "Remove the circle" must mean one of the two.
        others = [thing for thing in COMBINATIONS if kind == "add" or thing.shape != subject.shape]
        other = replace(rng.choice(others), position=OPPOSITE[subject.position])
    added = kind == "add"
    return Edit(kind=kind, before=None if added else subject, after=subject if added else None, other=other)


def draw_edit(edit: Edit, height: int, width: int, rng: random.Random) -> tuple[Image.Image, Image.Image]:
    """Source and target."""
    own, others = Jitter.draw(rng), Jitter.draw(rng)

    def scene(subject: Combination | None) -> Image.Image:
        objects = [(subject, own), (edit.other, others)]
        return draw_scene([(thing, jitter) for thing, jitter in objects if thing is not None], height, width)

    return scene(edit.before), scene(edit.after)


def instructions() -> list[str]:
    """Every instruction there is, once, in a fixed order: what the tokenizer is trained on."""
    subjects = list(COMBINATIONS)
    changes = [Edit(kind=kind, before=thing, after=thing) for kind in CHANGES for thing in subjects]
    added = [Edit(kind="add", before=None, after=thing) for thing in subjects]
    removed = [Edit(kind="remove", before=thing, after=None) for thing in subjects]
    return list(dict.fromkeys(edit.instruction for edit in (*changes, *added, *removed)))
