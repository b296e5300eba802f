"""What scenes are made of: one object of two touching parts in shades of one colour, on a dark ground.

The parts differ less from each other than from the ground: a segmenter that is given a point in one of them takes
both, unless a negative point says where not to look. Colours are RGB in 0..1.
"""

from __future__ import annotations

from collections.abc import Mapping

COLORS: Mapping[str, tuple[float, float, float]] = {
    "red": (0.75, 0.18, 0.18),
    "green": (0.18, 0.62, 0.18),
    "blue": (0.18, 0.28, 0.80),
    "yellow": (0.72, 0.66, 0.15),
}
PARTS = ("plain", "light")
"""Each object has one of both; the light one is brighter by LIGHTER in every channel."""
LIGHTER = 0.13
WORDS = (*COLORS, *PARTS)
VERSION = 1
"""Raised when the same configuration gives other scenes or weights."""


def query_of(color: str, part: str) -> str:
    return f"{part} {color}"
