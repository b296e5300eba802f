"""Draws samples in grids with captions, and pairs of baseline and trained samples with their rewards."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw
from torch import Tensor

from visual_grpo.evaluation.fonts import Printable, is_readable, printable
from visual_grpo.images import read_image, to_pil
from visual_grpo.types import Judge, PromptRecord, Sample

WIDTH = 224
"""Width in pixels of every image in a picture."""
GAP = 14
LEADING = 5
TEXT_SIZE = 19
MAX_LINES = 4
PAPER = "white"
INK = "#1f2328"
MUTED = "#656d76"
BETTER = "#1a7f37"
WORSE = "#cf222e"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Samples of the same prompt and seed before and after training."""

    prompt: str
    baseline: Image.Image | Tensor
    trained: Image.Image | Tensor
    baseline_reward: float
    trained_reward: float
    """NaN = could not be scored."""
    source: Image.Image | Tensor | None = None
    """The image that both were made from, unless their pictures already show it."""


def of_sample(record: PromptRecord, sample: Sample, judge: Judge) -> Image.Image:
    """The picture of a sample: an image itself; for a text the picture that a reward draws, else the source image with
    the text below."""
    painted = judge.picture(record, sample)
    if painted is not None:
        return to_pil(painted)
    above = [[_shown(read_image(path))] for path in record.source_images[:1]]
    return _table([*above, [_text(sample.text, most=3 * MAX_LINES)]])


def beside(images: Sequence[Image.Image | Tensor]) -> Image.Image:
    """A single Pillow image unchanged, otherwise the images in a row."""
    if len(images) == 1 and isinstance(images[0], Image.Image):
        return images[0]
    return _table([[_shown(image) for image in images]])


def caption(prompt: str, record: str, where: str = "report") -> str:
    """A prompt; where no font can show it, its record (an id, a file) and where the prompt can be read."""
    return prompt if is_readable(prompt) else f"{record}\nprompt: see {where}"


def grid(images: Sequence[Image.Image | Tensor], captions: Sequence[str], columns: int = 8) -> Image.Image:
    """Images (PIL, or uint8 [3, height, width]) in rows of ``columns``, each with its caption below.

    Line breaks in captions are kept; long lines wrap to at most `MAX_LINES` lines, and the rest is cut.
    """
    if not images or len(images) != len(captions) or columns < 1:
        raise ValueError(
            "a grid needs at least one image, a caption for each and at least one column,"
            f" got {len(images)} images, {len(captions)} captions, {columns} columns"
        )
    return _framed(
        [_grid_band(images[i : i + columns], captions[i : i + columns]) for i in _row_starts(images, columns)]
    )


def pairs(pairs: Sequence[Pair], columns: int = 6) -> Image.Image:
    """Each pair as a column: the prompt, the source image if there is one, and baseline and trained sample with their
    rewards."""
    if not pairs or columns < 1:
        raise ValueError(f"expected at least one pair and one column, got {len(pairs)} and {columns}")
    return _framed([_pairs_band(pairs[i : i + columns]) for i in _row_starts(pairs, columns)])


def _grid_band(images: Sequence[Image.Image | Tensor], captions: Sequence[str]) -> Image.Image:
    return _table([[_shown(image) for image in images], [_text(caption) for caption in captions]])


def _pairs_band(pairs: Sequence[Pair]) -> Image.Image:
    before = [_shown(pair.baseline) for pair in pairs]
    after = [_shown(pair.trained) for pair in pairs]
    blank = _text("", width=1)
    return _table(
        [
            [blank, *(_text(pair.prompt) for pair in pairs)],
            *_source_row(pairs),
            [_sideways("baseline", before[0].height), *before],
            [blank, *(_text(_worth(pair.baseline_reward), MUTED) for pair in pairs)],
            [_sideways("trained", after[0].height), *after],
            [blank, *(_text(_gain(pair), _colour(pair)) for pair in pairs)],
        ]
    )


def _source_row(pairs: Sequence[Pair]) -> list[list[Image.Image]]:
    """The row of source images; no row if no pair has one."""
    sources = [None if pair.source is None else _shown(pair.source) for pair in pairs]
    height = max((source.height for source in sources if source is not None), default=0)
    if not height:
        return []
    return [[_sideways("source", height), *(source or _text("") for source in sources)]]


def _gain(pair: Pair) -> str:
    change = pair.trained_reward - pair.baseline_reward
    return _worth(pair.trained_reward) + ("" if math.isnan(change) else f" ({change:+z.2f})")


def _worth(reward: float) -> str:
    return "could not be scored" if math.isnan(reward) else f"reward {reward:z.2f}"


def _colour(pair: Pair) -> str:
    change = pair.trained_reward - pair.baseline_reward
    if math.isnan(change) or round(change, 2) == 0:  # As it is shown.
        return MUTED
    return BETTER if change > 0 else WORSE


def _shown(image: Image.Image | Tensor) -> Image.Image:
    picture = image.convert("RGB") if isinstance(image, Image.Image) else to_pil(image)
    height = max(1, round(picture.height * WIDTH / picture.width))
    return picture.resize((WIDTH, height), Image.Resampling.LANCZOS)


def _text(text: str, colour: str = INK, width: int = WIDTH, most: int = MAX_LINES) -> Image.Image:
    """Text as a picture ``width`` pixels wide and as high as its lines."""
    lines = [(line, shown.font) for shown in map(_printable, text.split("\n")) for line in wrap(shown, width, most)]
    step = round(TEXT_SIZE * 1.3)
    canvas = Image.new("RGB", (width, step * len(lines)), PAPER)
    brush = ImageDraw.Draw(canvas)
    for row, (line, font) in enumerate(lines):
        brush.text((0, row * step), line, fill=colour, font=font)
    return canvas


def _sideways(text: str, height: int) -> Image.Image:
    """One line of text rotated to read upwards, centred along ``height``."""
    shown = _printable(text)
    length = math.ceil(shown.font.getlength(text))
    line = Image.new("RGB", (height, round(TEXT_SIZE * 1.3)), PAPER)
    ImageDraw.Draw(line).text(((height - length) // 2, 0), text, fill=MUTED, font=shown.font)
    return line.transpose(Image.Transpose.ROTATE_90)


def wrap(shown: Printable, width: int, most: int = MAX_LINES) -> list[str]:
    """Breaks text into lines of at most ``width`` pixels, between words or, within a long word, between characters.

    At most ``most`` lines; the last one ends in an ellipsis if text was cut.
    """

    def fits(line: str) -> bool:
        return shown.font.getlength(line) <= width

    lines = [""]
    for word in shown.text.split(" "):
        joined = f"{lines[-1]} {word}".lstrip()
        if fits(joined):
            lines[-1] = joined
            continue
        if fits(word):
            lines.append(word)
            continue
        lines[-1] += " " if lines[-1] else ""
        for character in word:
            if fits(lines[-1] + character):
                lines[-1] += character
            else:
                lines.append(character)
    if len(lines) <= most:
        return lines
    last = lines[most - 1]
    while last and not fits(last + "…"):
        last = last[:-1]
    return [*lines[: most - 1], last + "…"]


def _table(rows: Sequence[Sequence[Image.Image]]) -> Image.Image:
    """Pictures in rows and columns, each column as wide and each row as high as its largest."""
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


def _framed(bands: Sequence[Image.Image]) -> Image.Image:
    """Stacks bands vertically on a white background with a margin."""
    width = max(band.width for band in bands) + 2 * GAP
    canvas = Image.new("RGB", (width, sum(band.height + GAP for band in bands) + GAP), PAPER)
    top = GAP
    for band in bands:
        canvas.paste(band, (GAP, top))
        top += band.height + GAP
    return canvas


def _printable(text: str) -> Printable:
    return printable(text, TEXT_SIZE)


def _row_starts(items: Sequence[object], columns: int) -> range:
    return range(0, len(items), columns)


def data_uri(path: Path, side: int, quality: int = 80) -> str:
    """The image as WebP of at most ``side`` pixels a side; raises UserError if it cannot be read."""
    return pil_data_uri(read_image(path), side, quality)


def pil_data_uri(image: Image.Image, side: int, quality: int = 80) -> str:
    small = image.convert("RGB")
    small.thumbnail((side, side))
    file = io.BytesIO()
    small.save(file, "WEBP", quality=quality, method=4)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"
