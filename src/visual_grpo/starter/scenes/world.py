"""The vocabulary of scenes: one object of two touching parts in shades of the same colour, on a dark background.

The parts differ less from each other than from the background: given a point in one part, the segmenter returns both,
unless a negative point excludes the other. Colours are RGB in 0..1.
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
"""Each object has one part of each kind; the light part is brighter by LIGHTER in every channel."""
LIGHTER = 0.13
WORDS = (*COLORS, *PARTS)
VERSION = 1
"""To be raised when the same configuration gives other scenes or weights."""


def query_of(color: str, part: str) -> str:
    return f"{part} {color}"
