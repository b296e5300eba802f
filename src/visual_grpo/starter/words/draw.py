"""Draws words as light letters on dark tiles, in the font that comes with Pillow (Aileron)."""

from __future__ import annotations

from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from visual_grpo.starter.words.world import INK, LETTERS, TILES

_FONT_SIZE = 1.28
"""Times the width of a tile: the widest letter then nearly fills it."""
_STROKE = 0.03
"""Added around each stroke, in widths of a tile."""
_SUPERSAMPLING = 4


def draw(word: str, height: int, width: int, smudge: float = 0.0) -> Image.Image:
    """One anti-aliased RGB image of ``height`` x ``width`` pixels; the tiles share its width.

    ``smudge`` is the standard deviation of the Gaussian that blurs the ink, in widths of a tile.
    """
    ink = _letters(word, height, width)
    if smudge:
        ink = ink.filter(ImageFilter.GaussianBlur(smudge * width / LETTERS))
    return Image.composite(Image.new("RGB", (width, height), INK), _tiles(height, width), ink)


@cache
def _tiles(height: int, width: int) -> Image.Image:
    tile = np.arange(width) * LETTERS // width
    return Image.fromarray(np.broadcast_to(np.array(TILES, np.uint8)[tile], (height, width, 3)).copy())


@cache
def _letters(word: str, height: int, width: int) -> Image.Image:
    """How much of each pixel ink covers, 0..255."""
    scale = _SUPERSAMPLING
    tile = width * scale / LETTERS
    font = ImageFont.load_default(_FONT_SIZE * tile)
    canvas = Image.new("L", (width * scale, height * scale))
    brush = ImageDraw.Draw(canvas)
    for place, letter in enumerate(word):
        middle = ((place + 0.5) * tile, height * scale / 2)
        brush.text(middle, letter, fill=255, font=font, anchor="mm", stroke_width=round(_STROKE * tile))
    return canvas.reduce(scale)
