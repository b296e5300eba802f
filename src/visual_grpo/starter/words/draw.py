"""Draws words as light letters on dark tiles, in Pillow's default font (Aileron)."""

from __future__ import annotations

from functools import cache

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFont

from visual_grpo.starter.words.world import INK, LETTERS, TILES

_FONT_SIZE = 1.28
"""Relative to the shorter side of a tile; the widest letter nearly fills the tile."""
_STROKE = 0.03
"""Width added around each stroke, relative to the shorter side of a tile."""
_SUPERSAMPLING = 4


def draw(word: str, height: int, width: int, ghost: str = "", strength: float = 0.0) -> Image.Image:
    """One anti-aliased RGB image of ``height`` x ``width`` pixels; the tiles divide its width equally.

    With a ``ghost`` it is a double exposure: the ghost is drawn with a share ``strength`` (0..1) of the ink, ``word``
    with the rest.
    """
    ink = _letters(word, height, width)
    if ghost:
        faint = _letters(ghost, height, width).point(lambda cover: cover * strength)
        ink = ImageChops.lighter(ink.point(lambda cover: cover * (1 - strength)), faint)
    return Image.composite(Image.new("RGB", (width, height), INK), _tiles(height, width), ink)


@cache
def _tiles(height: int, width: int) -> Image.Image:
    tile = np.arange(width) * LETTERS // width
    return Image.fromarray(np.broadcast_to(np.array(TILES, np.uint8)[tile], (height, width, 3)).copy())


@cache
def _letters(word: str, height: int, width: int) -> Image.Image:
    """Ink coverage of each pixel, 0..255."""
    scale = _SUPERSAMPLING
    tile = width * scale / LETTERS
    size = min(tile, height * scale)
    font = ImageFont.load_default(_FONT_SIZE * size)
    canvas = Image.new("L", (width * scale, height * scale))
    brush = ImageDraw.Draw(canvas)
    for place, letter in enumerate(word):
        middle = ((place + 0.5) * tile, height * scale / 2)
        brush.text(middle, letter, fill=255, font=font, anchor="mm", stroke_width=round(_STROKE * size))
    return canvas.reduce(scale)
