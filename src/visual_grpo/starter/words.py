"""Drawn words: three letters, each on its own tile.

The 256 words are pronounceable and of letters that look different. The tiles' colours (8-bit RGB) are equally bright,
so that image tokens identify the tile whatever its letter, which the quoted text alone determines.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFont

from visual_grpo.config import Task
from visual_grpo.starter.pretraining import write_dataset

CONSONANTS = "HKLNPSTZ"
VOWELS = "AEOU"
WORDS = tuple("".join(letters) for letters in product(CONSONANTS, VOWELS, CONSONANTS))
LETTERS = 3
TILES = ((36, 36, 78), (36, 78, 36), (78, 36, 36))
"""From left to right."""
INK = (235, 235, 235)
_FONT_SIZE = 1.28
"""Relative to the shorter side of a tile; the widest letter nearly fills the tile."""
_STROKE = 0.03
"""Width added around each stroke, relative to the shorter side of a tile."""
_SUPERSAMPLING = 4
_VERSION = 1
"""To be raised when the same configuration draws other pictures."""
_TARGETS = "target_images"


def prompt_of(word: str) -> str:
    return f'a sign that says "{word}"'


def draw(word: str, height: int, width: int, ghost: str = "", strength: float = 0.0) -> Image.Image:
    """Draws an RGB image of ``height`` x ``width`` pixels; the tiles divide its width equally.

    With a ``ghost`` it is a double exposure: the ghost has a share ``strength`` (0..1) of the ink, ``word`` the rest.
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


def draw_words(
    folder: Path, records_per_prompt: int, height: int, width: int, seed: int = 0, task: Task = "t2i"
) -> str:
    """Writes ``records.jsonl`` and ``target_images/`` as `write_dataset` does, ``records_per_prompt`` of each word.

    Nothing depends on ``seed``, and ``task`` is t2i.
    """

    def records(fresh: Path) -> Iterator[dict[str, Any]]:
        for word in WORDS:
            draw(word, height, width).save(fresh / _TARGETS / f"{word}.png")
        for number, word in enumerate(WORDS * records_per_prompt):
            shown = {"prompt": prompt_of(word), "target_image": f"{_TARGETS}/{word}.png", "metadata": {"text": word}}
            yield {"id": f"word_{number:05d}", **shown}

    recipe = {"words": _VERSION, "records_per_prompt": records_per_prompt, "height": height, "width": width}
    return write_dataset(folder, recipe, (_TARGETS,), records)
