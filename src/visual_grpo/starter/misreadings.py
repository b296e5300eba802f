"""What the base policy gets wrong on purpose.

The AR module is pretrained on pictures that show another word's meaning for a part of the captions. Such
systematic errors survive top-p sampling (plain noise would be sharpened away), and because the right
reading keeps about half of the probability, groups of samples differ and GRPO can correct them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from visual_grpo.shapes_world import ATTRIBUTES, Combination

MISREADINGS: Mapping[str, Mapping[str, tuple[str, float]]] = {
    "color": {"yellow": ("red", 0.55), "purple": ("blue", 0.55)},
    "shape": {"triangle": ("square", 0.5)},
    "position": {"top": ("bottom", 0.55)},
    "size": {"small": ("large", 0.5)},
}
"""Attribute -> word -> (what is drawn instead, how often)."""


def misread(asked: Combination, rng: random.Random) -> Combination:
    """The combination that a weak policy draws when ``asked`` is meant."""
    drawn = {}
    for attribute in ATTRIBUTES:
        word = getattr(asked, attribute)
        instead, share = MISREADINGS[attribute].get(word, (word, 0.0))
        drawn[attribute] = instead if rng.random() < share else word
    return Combination(**drawn)
