"""Finds a font with all glyphs of a text, or escapes the characters that no font can show."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from matplotlib import font_manager, get_data_path
from matplotlib.ft2font import FT2Font
from PIL import ImageFont

DEFAULT = Path(get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
"""Included in matplotlib: Latin, Greek, Cyrillic, Arabic and more, but no Chinese, Japanese or Korean."""


class Printable(NamedTuple):
    """A text and a font with all of its glyphs."""

    text: str
    font: ImageFont.FreeTypeFont


def printable(text: str, size: int) -> Printable:
    """``text`` on one line with a font of ``size`` pixels that can show it.

    Tries the default font, then the system's fonts. If none has all glyphs, the characters missing from the default
    font are replaced by escape sequences (``\\u7ea2``).
    """
    text = " ".join(text.split())
    lacking = frozenset(text) - _glyphs(DEFAULT)
    path = _system_font_with(frozenset(text)) if lacking else DEFAULT
    if path is None:
        text = "".join(c.encode("unicode_escape").decode() if c in lacking else c for c in text)
    return Printable(text, ImageFont.truetype(path or DEFAULT, size))


@lru_cache(maxsize=256)
def _system_font_with(characters: frozenset[str]) -> Path | None:
    """The first usable system font, by name, that has all ``characters``."""
    for path in sorted(map(Path, font_manager.findSystemFonts()), key=lambda path: path.name):
        if characters <= _glyphs(path):
            return path
    return None


@lru_cache(maxsize=512)
def _glyphs(path: Path) -> frozenset[str]:
    """The characters that a font can draw; none if it cannot be opened or scaled (bitmap emoji fonts)."""
    try:
        ImageFont.truetype(path, 16)
        return frozenset(map(chr, FT2Font(str(path)).get_charmap()))
    except (OSError, RuntimeError):
        return frozenset()
