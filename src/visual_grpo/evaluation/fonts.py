"""Finds a font with the glyphs of a text, and says where there is none."""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from matplotlib import font_manager, get_data_path
from matplotlib.ft2font import FT2Font
from PIL import ImageFont

DEFAULT = Path(get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
"""Included in matplotlib: Latin, Greek, Cyrillic, Arabic and more, but no Chinese, Japanese or Korean."""
MISSING = "□"
"""In the place of a character that no font has."""

log = logging.getLogger(__name__)


class Printable(NamedTuple):
    """A text and a font with all of its glyphs."""

    text: str
    font: ImageFont.FreeTypeFont


def printable(text: str, size: int) -> Printable:
    """``text`` on one line with a font of ``size`` pixels that can show it.

    Tries the default font, then the system's fonts. If none has all glyphs, it is the font with the most of them, and
    the others become `MISSING`.
    """
    text = " ".join(text.split())
    path = _font_for(frozenset(text))
    shown = "".join(c if c in _glyphs(path) else MISSING for c in text)
    return Printable(shown, ImageFont.truetype(path, size))


def is_readable(text: str) -> bool:
    """Whether a font of this machine has at least half of the characters; says once what to install if none has."""
    characters = "".join(text.split())
    lacking = [c for c in characters if c not in _glyphs(_font_for(frozenset(characters)))]
    if 2 * len(lacking) <= len(characters):
        return True
    _say_what_to_install()
    return False


@lru_cache(maxsize=1)
def _say_what_to_install() -> None:
    log.warning(
        "No font of this machine can show some of the prompts: pictures name the record instead. Install a font with"
        " these characters, for Chinese, Japanese and Korean for example: apt install fonts-noto-cjk"
    )


@lru_cache(maxsize=256)
def _font_for(characters: frozenset[str]) -> Path:
    """The default font or the first system font, by name, that has all ``characters``, else the most of them."""
    if characters <= _glyphs(DEFAULT):
        return DEFAULT
    system = sorted(map(Path, font_manager.findSystemFonts()), key=lambda path: path.name)
    return max([DEFAULT, *system], key=lambda path: len(characters & _glyphs(path)))


@lru_cache(maxsize=512)
def _glyphs(path: Path) -> frozenset[str]:
    """The characters that a font can draw; none if it cannot be opened or scaled (bitmap emoji fonts)."""
    try:
        ImageFont.truetype(path, 16)
        return frozenset(map(chr, FT2Font(str(path)).get_charmap()))
    except (OSError, RuntimeError):
        return frozenset()
