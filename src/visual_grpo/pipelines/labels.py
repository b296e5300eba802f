"""Labels negative points by every rule, and shows a few of them, to compare the rules."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from kedro.pipeline import Node, Pipeline
from PIL import Image, ImageChops, ImageDraw, ImageFilter
from torch import Generator, Tensor

from visual_grpo.common import console
from visual_grpo.common.errors import Remedy, UserError
from visual_grpo.common.geometry import Box, Pixel, Point, edge, multimask, ring
from visual_grpo.common.images import read_image, to_pil, to_tensor
from visual_grpo.common.masks import read_mask
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import DataConfig, RewardConfig
from visual_grpo.data.manifest import RecordTable
from visual_grpo.data.splits import OPEN
from visual_grpo.evaluation.pictures import BETTER, INK, PAPER, WIDTH, WORSE, caption, grid
from visual_grpo.evaluation.samples import image_seed
from visual_grpo.rewards.segmentation import DEFAULT, PointPrompt, Segmenter, build_segmenter, true_box_and_points


def create_pipeline() -> Pipeline:
    return Pipeline(
        [
            Node(
                label_records,
                ["params:seed", "params:data", "params:rewards", "records", "draft"],
                "negative_labels",
                name="label_records",
            ),
        ],
        tags=["apart"],
    )


COUNT = 3
"""Points of each kind."""
SHOWN = 8
"""Records in the picture."""
CANVAS = 840
"""Margins and spacings are given in pixels of an image with this longer side, and scaled to the actual image."""
DOT = 5
"""Radius of a point in pixels."""


def label_records(
    seed: int, data: DataConfig, rewards: dict[str, RewardConfig], records: RecordTable, draft: Path
) -> Path:
    """Writes ``labels.jsonl`` (id, kind, points: a line for each record and kind) and ``labels.png``, made
    with the segmenter of the reward ``negative_points``."""
    if data.task != "segmentation":
        raise UserError(
            f"The labels are made from masks, so data.task must be segmentation, got {data.task}.",
            remedy=Remedy("labels", environment="negative_points"),
        )
    reward = rewards.get("negative_points")
    options: Any = reward.options.get("segmenter", DEFAULT) if reward else DEFAULT
    segmenter = build_segmenter(options)
    chosen, shown = records.split(*OPEN), []
    lines = []
    with console.progress("labels", len(chosen)) as bar:
        for number, record in enumerate(chosen):
            labelled = label(record, segmenter, seed)
            lines += [{"id": record.id, "kind": kind, "points": points} for kind, points in labelled.labels.items()]
            if number % -(-len(chosen) // SHOWN) == 0:
                shown.append(labelled)
            bar.advance()
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (draft / "labels.jsonl").write_text(text, encoding="utf-8")
    if shown:
        draw(shown).save(draft / "labels.png")
    return draft


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
    """Kind -> points; the kind ``multimask`` needs a segmenter with `multimasks`."""


def label(record: PromptRecord, segmenter: Segmenter, seed: int) -> Labelled:
    """Labels one record; the labels depend on seed and record only, not on other records."""
    assert record.target_image is not None, "records of data.task segmentation have a mask"
    image = to_tensor(read_image(record.source_images[0]))
    truth = read_mask(record.target_image)
    box, points = true_box_and_points(record)
    prompt = PointPrompt(positives=points, box=box)
    scale = max(truth.shape) / CANVAS
    margin, spacing, width = (max(1.0, pixels * scale) for pixels in (50, 20, 5))
    generator = Generator().manual_seed(image_seed(seed, record.id, 0))
    labels = {
        "ring": ring(truth, box, COUNT, generator, margin=margin, spacing=spacing),
        "edge": edge(truth, COUNT, generator, width=width, spacing=spacing),
    }
    if hasattr(segmenter, "multimasks"):
        masks, scores = segmenter.multimasks(segmenter.embed(image), prompt)
        labels["multimask"] = multimask(truth, masks, scores, COUNT, generator, spacing=spacing)
    return Labelled(record=record, image=image, truth=truth, prompt=prompt, labels=labels)


def draw(labelled: Sequence[Labelled]) -> Image.Image:
    """Renders a row for each record: true points and box, then the points of each kind; the true mask is outlined."""
    pictures, captions = [], []
    for one in labelled:
        pictures.append(_picture(one, one.prompt.positives, BETTER, one.prompt.box))
        captions.append(caption(one.record.prompt, one.record.id, "records"))
        pictures += [_picture(one, points, WORSE) for points in one.labels.values()]
        captions += [f"{kind}: {len(points)}" for kind, points in one.labels.items()]
    return grid(pictures, captions, columns=1 + len(labelled[0].labels))


def _picture(one: Labelled, points: Sequence[Point], colour: str, box: Box | None = None) -> Image.Image:
    """Renders outline and points on the image, scaled without smoothing so that single pixels are visible."""
    height, width = one.truth.shape
    factor = WIDTH / width
    size = (WIDTH, max(1, round(height * factor)))
    picture = to_pil(one.image).resize(size, Image.Resampling.NEAREST)
    truth = Image.fromarray(one.truth.numpy().astype(np.uint8) * 255).resize(size, Image.Resampling.NEAREST)
    picture.paste(PAPER, mask=ImageChops.subtract(truth, truth.filter(ImageFilter.MinFilter(3))))
    brush = ImageDraw.Draw(picture)
    if box is not None:
        x1, y1, x2, y2 = box
        brush.rectangle([x1 * factor, y1 * factor, (x2 + 1) * factor - 1, (y2 + 1) * factor - 1], outline=colour)
    for x, y in points:
        brush.circle(((x + 0.5) * factor, (y + 0.5) * factor), DOT, fill=colour, outline=INK)
    return picture
