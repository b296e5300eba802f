"""Arranges samples in grids with captions, in a font that can show them; a video is a strip of some of its frames."""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from matplotlib import font_manager, get_data_path
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from visual_grpo.common.images import is_image, read_image, to_pil
from visual_grpo.common.types import PromptRecord, Sample, TextSample, VideoSample
from visual_grpo.common.videos import SUFFIX, encoded_video, read_animation, read_frames
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.rewards.reward import FunctionReward

WIDTH = 224
"""Width in pixels of every image in a picture."""
STRIP = 4
"""Frames of a video in a picture, from top to bottom."""
GAP = 14
LEADING = 5
TEXT_SIZE, LINE_HEIGHT = 19, 25
MAX_LINES = 4
PAPER = "white"
INK = "#1f2328"
BETTER = "#1a7f37"
WORSE = "#cf222e"
DEFAULT_FONT = Path(get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
"""Included in matplotlib: Latin, Greek, Cyrillic, Arabic and more, but no Chinese, Japanese or Korean."""
MISSING = "□"
"""Replaces a character that no font has."""

log = logging.getLogger(__name__)


Painter = RewardSet | FunctionReward | None
"""Object that may paint a text."""


def of_sample(record: PromptRecord, sample: Sample, painter: Painter) -> Image.Image:
    """Returns a sample as a picture: an image itself; a video as a strip of frames; a text as ``painter`` paints it,
    else the source image with the text below."""
    if isinstance(sample, VideoSample):
        return _strip(sample.frames[((torch.arange(STRIP) + 0.5) * len(sample.frames) / STRIP).long()])
    if is_image(sample):
        return to_pil(sample)
    painted = None if painter is None else painter.picture(record, sample)
    if painted is not None:
        return to_pil(painted)
    above = [[scaled(read_image(path))] for path in record.source_images[:1]]
    return table([*above, [text(sample.text, most=3 * MAX_LINES)]])


def beside(record: PromptRecord, sample: Sample) -> tuple[Path, ...]:
    """Returns the sources that a `grid` shows beside a sample; the picture of a text shows its own."""
    return () if isinstance(sample, TextSample) else record.source_images


def of_file(file: Path) -> Image.Image:
    """Returns a sample's file as a picture, a video as `of_sample` does."""
    return _strip(read_frames(file, STRIP)) if file.suffix == SUFFIX else read_image(file)


def suffix_of(sample: Sample) -> str:
    return SUFFIX if isinstance(sample, VideoSample) else ".png"


def save(record: PromptRecord, sample: Sample, painter: Painter, file: Path, compress_level: int = 6) -> None:
    """Writes a sample's file: a video that plays, else `of_sample`."""
    if isinstance(sample, VideoSample):
        file.write_bytes(encoded_video(sample))
    else:
        of_sample(record, sample, painter).save(file, compress_level=compress_level)


def _strip(frames: Tensor) -> Image.Image:
    """``frames``: [n, 3, height, width]. Each is scaled alone, so that no line between two enters a frame."""
    return stacked([*frames])


def grid(
    images: Sequence[Image.Image | Tensor],
    captions: Sequence[str],
    columns: int = 8,
    sources: Sequence[tuple[Path, ...]] = (),
) -> Image.Image:
    """Arranges images (PIL, or uint8 [3, height, width]) in rows of ``columns``, each with its caption below.

    Line breaks in captions are kept; long lines wrap to at most `MAX_LINES` lines, and the rest is cut. ``sources`` are
    the files that each image was made from; neighbours with the same ones have them once, on their left.
    """
    cells = [(scaled(image), text(caption)) for image, caption in zip(images, captions, strict=True)]
    bands = []
    for start in range(0, len(cells), columns):
        band = []
        row = range(len(cells))[start : start + columns]
        for files, places in groupby(row, key=lambda place: sources[place] if sources else ()):
            band += [(scaled(read_image(file)), text("source")) for file in files]
            band += [cells[place] for place in places]
        bands.append(table([*zip(*band, strict=True)]))
    return framed(bands)


def stacked(images: Sequence[Image.Image | Tensor]) -> Image.Image:
    """Arranges images in a column."""
    return table([[scaled(image)] for image in images])


def caption(prompt: str, record: str, where: str = "report") -> str:
    """Returns the prompt; where no font has half of its characters, its record (id or file) and where to read it."""
    characters = "".join(prompt.split())
    font = _font_for(frozenset(characters))
    if 2 * sum(c not in _glyphs(font) for c in characters) <= len(characters):
        return prompt
    _say_what_to_install()
    return f"{record}\nprompt: see {where}"


def table(rows: Sequence[Sequence[Image.Image]]) -> Image.Image:
    """Arranges pictures; each column is as wide and each row as high as its largest cell."""
    widths = [max(cell.width for cell in column) for column in zip(*rows, strict=True)]
    heights = [max(cell.height for cell in row) for row in rows]
    canvas = Image.new("RGB", (sum(widths) + GAP * (len(widths) - 1), sum(heights) + LEADING * len(rows)), PAPER)
    top = 0
    for row, height in zip(rows, heights, strict=True):
        left = 0
        for cell, width in zip(row, widths, strict=True):
            canvas.paste(cell, (left, top))
            left += width + GAP
        top += height + LEADING
    return canvas


def framed(bands: Sequence[Image.Image]) -> Image.Image:
    """Stacks bands vertically on a white background with a margin."""
    width = max(band.width for band in bands) + 2 * GAP
    canvas = Image.new("RGB", (width, sum(band.height + GAP for band in bands) + GAP), PAPER)
    top = GAP
    for band in bands:
        canvas.paste(band, (GAP, top))
        top += band.height + GAP
    return canvas


def scaled(image: Image.Image | Tensor) -> Image.Image:
    picture = image.convert("RGB") if isinstance(image, Image.Image) else to_pil(image)
    height = max(1, round(picture.height * WIDTH / picture.width))
    return picture.resize((WIDTH, height), Image.Resampling.LANCZOS)


def text(shown: str, colour: str = INK, width: int = WIDTH, most: int = MAX_LINES) -> Image.Image:
    """Renders text ``width`` pixels wide and as high as its lines."""
    paragraphs = [printable(line, TEXT_SIZE) for line in shown.split("\n")]
    lines = [(line, font) for paragraph, font in paragraphs for line in wrap(paragraph, font, width, most)]
    canvas = Image.new("RGB", (width, LINE_HEIGHT * len(lines)), PAPER)
    brush = ImageDraw.Draw(canvas)
    for row, (line, font) in enumerate(lines):
        brush.text((0, row * LINE_HEIGHT), line, fill=colour, font=font)
    return canvas


def wrap(line: str, font: ImageFont.FreeTypeFont, width: int, most: int = MAX_LINES) -> list[str]:
    """Breaks text into lines of at most ``width`` pixels, between words or, within a long word, between characters.

    At most ``most`` lines; the last one ends in an ellipsis if text was cut.
    """

    def fits(part: str) -> bool:
        return font.getlength(part) <= width

    lines = [""]
    for word in line.split(" "):
        space = " " if lines[-1] else ""
        for part in [word] if fits(word) else word:
            joined = lines[-1] + space + part
            if fits(joined):
                lines[-1] = joined
            else:
                lines.append(part)
            space = ""
    if len(lines) <= most:
        return lines
    last = lines[most - 1]
    while last and not fits(last + "…"):
        last = last[:-1]
    return [*lines[: most - 1], last + "…"]


def printable(line: str, size: int) -> tuple[str, ImageFont.FreeTypeFont]:
    """Returns ``line`` and a font of ``size`` pixels; characters that the font lacks become `MISSING`."""
    line = " ".join(line.split())
    path = _font_for(frozenset(line))
    return "".join(c if c in _glyphs(path) else MISSING for c in line), ImageFont.truetype(path, size)


def data_uri(path: Path, side: int) -> str:
    """Encodes a file as WebP of at most ``side`` pixels a side, which plays if it is a video; raises UserError if it
    cannot be read."""
    if path.suffix == SUFFIX:
        pictures, durations = read_animation(path)
        return encoded(pictures, side, save_all=True, append_images=pictures[1:], duration=durations, loop=0)
    return encoded([read_image(path).convert("RGB")], side)


def encoded(pictures: Sequence[Image.Image], side: int, **playing: Any) -> str:
    """Encodes a picture, or the pictures of an animation that is ``playing``, as `data_uri` does."""
    for picture in pictures:
        picture.thumbnail((side, side))
    file = io.BytesIO()
    pictures[0].save(file, "WEBP", quality=80, method=4, **playing)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"


@lru_cache(maxsize=1)
def _say_what_to_install() -> None:
    log.warning(
        "No font of this machine can show some of the prompts: pictures name the record instead. Install a font with"
        " these characters, for Chinese, Japanese and Korean for example: apt install fonts-noto-cjk"
    )


@lru_cache(maxsize=256)
def _font_for(characters: frozenset[str]) -> Path:
    """Finds the default or the first system font, by name, with all ``characters``, else with the most."""
    if characters <= _glyphs(DEFAULT_FONT):
        return DEFAULT_FONT
    system = sorted(map(Path, font_manager.findSystemFonts()), key=lambda path: path.name)
    return max([DEFAULT_FONT, *system], key=lambda path: len(characters & _glyphs(path)))


@lru_cache(maxsize=512)
def _glyphs(path: Path) -> frozenset[str]:
    """Returns the characters that a font has; none if it cannot be opened or scaled (bitmap fonts)."""
    try:
        ImageFont.truetype(path, 16)
        return frozenset(map(chr, FT2Font(str(path)).get_charmap()))
    except (OSError, RuntimeError):
        return frozenset()
