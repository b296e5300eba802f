"""The deliberate flaws of the base AR module: it misreads certain words.

The AR module is pretrained on captions of which a share is paired with the picture of another word. These systematic
errors survive top-p sampling (unsystematic noise would be cut off), and because the correct picture keeps about half
of the probability, samples of a group differ and GRPO can correct the errors.
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
"""Attribute -> word -> (the word that is drawn instead, probability)."""


def misread(asked: Combination, rng: random.Random, misreadings: Misreadings = MISREADINGS) -> Combination:
    """The combination that the flawed policy draws for ``asked``."""
    drawn = {}
    for attribute in ATTRIBUTES:
        word = getattr(asked, attribute)
        instead, share = misreadings[attribute].get(word, (word, 0.0))
        drawn[attribute] = instead if rng.random() < share else word
    return Combination(**drawn)


_NOT_DONE: Mapping[str, float] = {"recolour": 0.33, "move": 0.33, "resize": 0.33, "remove": 0.45}
"""Probability that an edit returns a copy of its source; additions are misread instead."""
_RESIZED_BY_MOVING = 0.4
_CENTERED_BY_RESIZING = 0.45
_WRONG_ONE_REMOVED = 0.3


def misread_edit(edit: Edit, rng: random.Random) -> tuple[Combination | None, Combination | None]:
    """The edited object and the other one as the flawed policy draws them; None = not drawn."""
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
    # With another object, only one position is left.
    return drawn if edit.other is None else replace(drawn, position=edit.after.position)


def _misread_change(kind: str, asked: Combination, rng: random.Random) -> Combination:
    """Misreads the changed attribute as in a prompt (except sizes), and sometimes changes another attribute too."""
    attribute = CHANGES[kind]
    drawn = asked
    if kind != "resize":
        drawn = replace(asked, **{attribute: getattr(misread(asked, rng), attribute)})
    if kind == "move" and rng.random() < _RESIZED_BY_MOVING:
        drawn = replace(drawn, size="large" if asked.size == "small" else "small")
    if kind == "resize" and rng.random() < _CENTERED_BY_RESIZING:
        drawn = replace(drawn, position="center")
    return drawn
