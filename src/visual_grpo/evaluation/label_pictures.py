"""Writes negative points by every rule for all records as a file, and a few as a picture, to compare the rules."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter
from torch import Generator, Tensor

from visual_grpo.evaluation.generate import image_seed
from visual_grpo.evaluation.pictures import BETTER, INK, PAPER, WIDTH, WORSE, caption, grid
from visual_grpo.images import read_image, read_mask, to_pil, to_tensor
from visual_grpo.segmentation.geometry import Pixel, edge, multimask, ring
from visual_grpo.segmentation.segmenter import (
    Box,
    MultimaskSegmenter,
    Point,
    PointPrompt,
    Segmenter,
    true_box_and_points,
)
from visual_grpo.types import PromptRecord

COUNT = 3
"""Points of each kind."""
SHOWN = 8
"""Records in the picture."""
CANVAS = 840
"""Margins and spacings are given in pixels of an image with this longer side, and scaled to the actual image."""
DOT = 5
"""Radius of a drawn point in pixels."""


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """A record with its negative labels."""

    record: PromptRecord
    image: Tensor
    """uint8 [3, H, W]"""
    truth: Tensor
    """bool [H, W]"""
    prompt: PointPrompt
    labels: Mapping[str, list[Pixel]]
    """By kind."""


def write_labels(
    folder: Path, records: Sequence[PromptRecord], segmenter: Segmenter[Any], seed: int, advance: Callable[[], None]
) -> None:
    """Writes ``labels.jsonl`` (id, kind, points: a line for each record and kind) and ``labels.png``.

    Args:
        records: each with one source image and the true mask as its ``target_image``.
        segmenter: the kind ``multimask`` is added if it has `multimasks`.
        advance: called after each record.
    """
    shown = []
    every = -(-len(records) // SHOWN)
    with (folder / "labels.jsonl").open("w", encoding="utf-8") as file:
        for number, record in enumerate(records):
            labelled = label(record, segmenter, seed)
            for kind, points in labelled.labels.items():
                file.write(json.dumps({"id": record.id, "kind": kind, "points": points}, ensure_ascii=False) + "\n")
            if number % every == 0:
                shown.append(labelled)
            advance()
    if shown:
        draw(shown).save(folder / "labels.png")


def label(record: PromptRecord, segmenter: Segmenter[Any], seed: int) -> Labelled:
    """One record's negative labels; they depend on seed and record only, not on other records."""
    assert record.target_image is not None, "records of data.task segmentation have a mask"
    image = to_tensor(read_image(record.source_images[0]))
    truth = read_mask(record.target_image)
    box, points = true_box_and_points(record)
    prompt = PointPrompt(positives=points, box=box)
    scale = max(truth.shape) / CANVAS
    generator = Generator().manual_seed(image_seed(seed, record.id, 0))
    labels = _labels(image, truth, prompt, segmenter, scale, generator)
    return Labelled(record=record, image=image, truth=truth, prompt=prompt, labels=labels)


def _labels(
    image: Tensor, truth: Tensor, prompt: PointPrompt, segmenter: Segmenter[Any], scale: float, generator: Generator
) -> dict[str, list[Pixel]]:
    assert prompt.box is not None
    margin, spacing, width = (max(1.0, pixels * scale) for pixels in (50, 20, 5))
    labels = {
        "ring": ring(truth, prompt.box, COUNT, generator, margin=margin, spacing=spacing),
        "edge": edge(truth, COUNT, generator, width=width, spacing=spacing),
    }
    if isinstance(segmenter, MultimaskSegmenter):
        masks, scores = segmenter.multimasks(segmenter.embed(image), prompt)
        labels["multimask"] = multimask(truth, masks, scores, COUNT, generator, spacing=spacing)
    return labels


def draw(labelled: Sequence[Labelled]) -> Image.Image:
    """A row for each record: the true points and box, then the points of each kind; the true mask is outlined."""
    cells = [cell for one in labelled for cell in _row(one)]
    columns = 1 + len(labelled[0].labels)
    return grid([picture for picture, _ in cells], [text for _, text in cells], columns)


def _row(one: Labelled) -> list[tuple[Image.Image, str]]:
    asked = _picture(one, one.prompt.positives, BETTER, one.prompt.box)
    kinds = [(_picture(one, points, WORSE), f"{kind}: {len(points)}") for kind, points in one.labels.items()]
    return [(asked, caption(one.record.prompt, one.record.id, "records")), *kinds]


def _picture(one: Labelled, points: Sequence[Point], colour: str, box: Box | None = None) -> Image.Image:
    """The image with outline and points, scaled without smoothing so that single pixels are visible."""
    height, width = one.truth.shape
    factor = WIDTH / width
    size = (WIDTH, max(1, round(height * factor)))
    picture = to_pil(one.image).resize(size, Image.Resampling.NEAREST)
    truth = Image.fromarray(one.truth.numpy().astype(np.uint8) * 255).resize(size, Image.Resampling.NEAREST)
    picture.paste(PAPER, mask=_outline(truth))
    brush = ImageDraw.Draw(picture)
    if box is not None:
        x1, y1, x2, y2 = box
        brush.rectangle([x1 * factor, y1 * factor, (x2 + 1) * factor - 1, (y2 + 1) * factor - 1], outline=colour)
    for x, y in points:
        brush.circle(((x + 0.5) * factor, (y + 0.5) * factor), DOT, fill=colour, outline=INK)
    return picture


def _outline(mask: Image.Image) -> Image.Image:
    """The mask's outermost pixels."""
    return ImageChops.subtract(mask, mask.filter(ImageFilter.MinFilter(3)))
