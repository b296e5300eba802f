"""The vocabulary and geometry of the drawn shapes, used for drawing (`draw`) and judging (`judge`).

Lengths are shares of an image's shorter side, centres are shares of (width, height), colours are 8-bit RGB. The centres
and radii keep every shape inside the image; with three centres per axis, neighbouring positions are a quarter of the
side apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

BACKGROUND = (30, 30, 30)
COLORS: Mapping[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 200, 60),
    "blue": (50, 80, 230),
    "yellow": (230, 210, 40),
    "purple": (180, 60, 200),
}
SHAPES = ("circle", "square", "triangle")
CENTERS: Mapping[str, tuple[float, float]] = {
    "left": (0.25, 0.5),
    "right": (0.75, 0.5),
    "top": (0.5, 0.25),
    "bottom": (0.5, 0.75),
    "center": (0.5, 0.5),
}
RADII: Mapping[str, float] = {"small": 0.16, "large": 0.228}
VOCABULARY: Mapping[str, tuple[str, ...]] = {
    "color": tuple(COLORS),
    "shape": SHAPES,
    "position": tuple(CENTERS),
    "size": tuple(RADII),
}
"""The words of every attribute."""
ATTRIBUTES = tuple(VOCABULARY)

OPPOSITE: Mapping[str, str] = {"left": "right", "right": "left", "top": "bottom", "bottom": "top"}
"""Two objects in one image are at opposite positions, so that each has its own half and its own image tokens."""
CHANGES: Mapping[str, str] = {"recolour": "color", "move": "position", "resize": "size"}
"""Edits of one attribute of an image's only object."""
EDITS = (*CHANGES, "add", "remove")
"""The kinds of edits; an image-to-image record names one in ``metadata["edit"]``."""

_PLACES = {
    "left": "on the left",
    "right": "on the right",
    "top": "at the top",
    "bottom": "at the bottom",
    "center": "in the center",
}


@dataclass(frozen=True, kw_only=True)
class Combination:
    """An object: one value of every attribute."""

    color: str
    shape: str
    position: str
    size: str

    @property
    def prompt(self) -> str:
        return f"a {self.size} {self.color} {self.shape} {_PLACES[self.position]}"


COMBINATIONS = tuple(
    Combination(color=c, shape=s, position=p, size=z) for c, s, p, z in product(COLORS, SHAPES, CENTERS, RADII)
)
"""All 150 of them, in a fixed order."""
