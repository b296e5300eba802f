"""What the base policy gets wrong on purpose.

The AR module is pretrained on pictures that show another word's meaning for a part of the captions. Such
systematic errors survive top-p sampling (plain noise would be sharpened away), and because the right
reading keeps about half of the probability, groups of samples differ and GRPO can correct them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from visual_grpo.starter.shapes.edits import Edit
from visual_grpo.starter.shapes.world import ATTRIBUTES, CHANGES, Combination

Misreadings = Mapping[str, Mapping[str, tuple[str, float]]]
"""Attribute -> word -> (what is drawn instead, how often)."""
MISREADINGS: Misreadings = {
    "color": {"yellow": ("red", 0.55), "purple": ("blue", 0.55)},
    "shape": {"triangle": ("square", 0.5)},
    "position": {"top": ("bottom", 0.55)},
    "size": {"small": ("large", 0.5)},
}
"""Of the small GLM-Image."""


def misread(asked: Combination, rng: random.Random, misreadings: Misreadings = MISREADINGS) -> Combination:
    """The combination that a weak policy draws when ``asked`` is meant."""
    drawn = {}
    for attribute in ATTRIBUTES:
        word = getattr(asked, attribute)
        instead, share = misreadings[attribute].get(word, (word, 0.0))
        drawn[attribute] = instead if rng.random() < share else word
    return Combination(**drawn)


_NOT_DONE: Mapping[str, float] = {"recolour": 0.33, "move": 0.33, "resize": 0.33, "remove": 0.45}
"""How often an edit comes back as a copy of its source; an addition is rather drawn wrong."""
_RESIZED_BY_MOVING = 0.4
_CENTERED_BY_RESIZING = 0.45
_WRONG_ONE_REMOVED = 0.3


def misread_edit(edit: Edit, rng: random.Random) -> tuple[Combination | None, Combination | None]:
    """The object that the edit is about and the other one, as a weak policy draws them; None = not there."""
    if edit.kind == "add":
        return _misread_addition(edit, rng), edit.other
    if rng.random() < _NOT_DONE[edit.kind]:
        return edit.before, edit.other
    if edit.kind == "remove":
        wrong = edit.other is not None and rng.random() < _WRONG_ONE_REMOVED
        return (edit.before, None) if wrong else (None, edit.other)
    assert edit.after is not None
    return _misread_change(edit.kind, edit.after, rng), None


def _misread_addition(edit: Edit, rng: random.Random) -> Combination:
    assert edit.after is not None
    drawn = misread(edit.after, rng)
    # Beside another object there is one place left.
    return drawn if edit.other is None else replace(drawn, position=edit.after.position)


def _misread_change(kind: str, asked: Combination, rng: random.Random) -> Combination:
    """The changed attribute misread as in a prompt, or another one spoilt on the way."""
    attribute = CHANGES[kind]
    drawn = asked
    if kind != "resize":
        drawn = replace(asked, **{attribute: getattr(misread(asked, rng), attribute)})
    if kind == "move" and rng.random() < _RESIZED_BY_MOVING:
        drawn = replace(drawn, size="large" if asked.size == "small" else "small")
    if kind == "resize" and rng.random() < _CENTERED_BY_RESIZING:
        drawn = replace(drawn, position="center")
    return drawn
