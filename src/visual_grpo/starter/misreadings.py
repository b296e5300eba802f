"""What the base policy gets wrong on purpose.

The AR module is pretrained on pictures that show another word's meaning for a part of the captions. Such
systematic errors survive top-p sampling (plain noise would be sharpened away), and because the right
reading keeps about half of the probability, groups of samples differ and GRPO can correct them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from visual_grpo.shapes_world import ATTRIBUTES, Combination

MISREADINGS: Mapping[str, Mapping[str, tuple[str, float]]] = {
    "color": {"yellow": ("red", 0.45), "purple": ("blue", 0.45)},
    "shape": {"triangle": ("square", 0.35)},
    "position": {"top": ("bottom", 0.45)},
    "size": {"small": ("large", 0.42)},
}
"""Attribute -> word -> (what is drawn instead, how often)."""


def misread(asked: Combination, rng: random.Random) -> Combination:
    """The combination that a weak policy draws when ``asked`` is meant."""
    drawn = {}
    for attribute in ATTRIBUTES:
        instead, share = MISREADINGS[attribute].get(getattr(asked, attribute), (None, 0.0))
        if rng.random() < share:
            drawn[attribute] = instead
    return replace(asked, **drawn)
