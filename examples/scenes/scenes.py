"""Scenes for negative points: one object of two touching parts in shades of the same colour, on a dark background.

The parts differ less from each other than from the background: given a point in one part, the segmenter returns both,
unless a negative point excludes the other. Colours are RGB in 0..1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from visual_grpo.common.geometry import box_of, inner_points
from visual_grpo.config import Task
from visual_grpo.starter.pretraining import write_dataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

COLORS: Mapping[str, tuple[float, float, float]] = {
    "red": (0.75, 0.18, 0.18),
    "green": (0.18, 0.62, 0.18),
    "blue": (0.18, 0.28, 0.80),
    "yellow": (0.72, 0.66, 0.15),
}
PARTS = ("plain", "light")
"""Each object has one part of each kind; the light part is brighter by LIGHTER in every channel."""
LIGHTER = 0.13
WORDS = (*COLORS, *PARTS)
_IMAGES, _MASKS = "images", "masks"
_PLACEMENTS = 60
"""Random placements that are tried per object; the first one inside the image is used."""
_RADII = (0.12, 0.17)
"""Range of a part's radius, as shares of the shorter side."""
_OVERLAP = 0.92
"""Distance of the parts' centres, as a share of the sum of their radii: below 1 they touch."""
_STRETCH = (0.9, 1.1)
_SQUARE = 0.87
"""Half of a square's side, relative to the part's radius."""
_GROUND = 0.12
_TINT = 0.03
_NOISE = 0.004
_SMALLEST = 0.015
"""Minimum visible area of a part, as a share of the image; scenes with a smaller part are discarded."""


def query_of(color: str, part: str) -> str:
    return f"{part} {color}"


@dataclass(frozen=True, kw_only=True)
class Scenes:
    """n scenes with one query each."""

    images: NDArray[np.uint8]
    """[n, H, W, 3] RGB."""
    parts: NDArray[np.int8]
    """[n, H, W]: index into PARTS, -1 = ground."""
    colors: NDArray[np.int64]
    """[n] index into COLORS."""
    asked: NDArray[np.int64]
    """[n] index into PARTS: the queried part."""

    def __len__(self) -> int:
        return len(self.images)

    @property
    def truths(self) -> NDArray[np.bool_]:
        """[n, H, W] true masks of the queries."""
        return self.parts == self.asked[:, None, None]

    @property
    def queries(self) -> list[tuple[str, str]]:
        """Names (colour, part) of each query."""
        colors = tuple(COLORS)
        return [(colors[c], PARTS[p]) for c, p in zip(self.colors, self.asked, strict=True)]


def draw_scenes(count: int, height: int, width: int, rng: np.random.Generator) -> Scenes:
    drawn: list[Scenes] = []
    while sum(map(len, drawn)) < count:
        drawn.append(_attempt(min(256, count), height, width, rng))
    fields = ("images", "parts", "colors", "asked")
    return Scenes(**{name: np.concatenate([getattr(s, name) for s in drawn])[:count] for name in fields})


def _attempt(count: int, height: int, width: int, rng: np.random.Generator) -> Scenes:
    """Renders ``count`` scenes and returns those whose parts fit into the image and are visible."""
    centers, radii, fits = _place(count, height, width, rng)
    base = np.array(list(COLORS.values()))[colors := rng.integers(len(COLORS), size=count)]
    base = base + rng.uniform(-_TINT, _TINT, (count, 3))
    lighter = rng.integers(2, size=count)  # which of the two blobs is the light part
    images = np.broadcast_to(rng.uniform(0, _GROUND, (count, 1, 1, 3)), (count, height, width, 3)).copy()
    parts = np.full((count, height, width), -1, np.int8)
    for blob in range(2):
        shown = _blob(centers[:, blob], radii[:, blob], height, width, rng) & (parts < 0)
        part = (lighter == blob).astype(np.int8)
        color = np.clip(base + LIGHTER * part[:, None], 0, 1)
        images = np.where(shown[..., None], color[:, None, None], images)
        parts = np.where(shown, part[:, None, None], parts)
    images = np.clip(images + rng.normal(0, _NOISE, images.shape), 0, 1)
    areas = np.stack([(parts == part).sum((1, 2)) for part in range(2)], 1)
    kept = fits & (areas > _SMALLEST * height * width).all(1)
    asked = rng.integers(2, size=count)
    return Scenes(
        images=(images * 255).round().astype(np.uint8)[kept], parts=parts[kept], colors=colors[kept], asked=asked[kept]
    )


def _place(
    count: int, height: int, width: int, rng: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Centres [n, 2, (x, y)] and radii [n, 2] of both blobs, and whether they fit into the image, [n]."""
    radii = rng.uniform(*_RADII, (count, _PLACEMENTS, 2)) * min(height, width)
    angle = rng.uniform(0, 2 * np.pi, (count, _PLACEMENTS))
    first = rng.uniform(0.1, 0.9, (count, _PLACEMENTS, 2)) * (width, height)
    apart = (radii.sum(-1) * _OVERLAP)[..., None] * np.stack([np.cos(angle), np.sin(angle)], -1)
    centers = np.stack([first, first + apart], 2)
    room = radii[..., None]
    inside: NDArray[np.bool_] = np.all((centers > room) & (centers < np.array([width, height]) - room), axis=(2, 3))
    rows, chosen = np.arange(count), inside.argmax(1)
    fits: NDArray[np.bool_] = inside[rows, chosen]
    return centers[rows, chosen], radii[rows, chosen], fits


def _blob(
    centers: NDArray[np.float64], radii: NDArray[np.float64], height: int, width: int, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Masks [n, H, W], each at random an ellipse or a rectangle."""
    y, x = np.mgrid[:height, :width].astype(float)
    stretch = rng.uniform(*_STRETCH, len(radii))[:, None, None]
    dx = (x - centers[:, 0, None, None]) / (radii[:, None, None] * stretch)
    dy = (y - centers[:, 1, None, None]) / (radii[:, None, None] / stretch)
    is_ellipse = rng.integers(2, size=len(radii))[:, None, None] == 0
    return np.where(is_ellipse, dx**2 + dy**2 <= 1, np.maximum(abs(dx), abs(dy)) <= _SQUARE)


def boxes(truths: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Bounding boxes [n, 4], (x1, y1, x2, y2) inclusive in pixels, of masks [n, H, W]."""
    return np.array([box_of(torch.from_numpy(mask.copy())) for mask in truths], dtype=np.int64)


def centers(truths: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[n, 2] (x, y): the innermost pixel of each mask [n, H, W]."""
    return np.array([inner_points(torch.from_numpy(mask.copy()), 1)[0] for mask in truths], dtype=np.int64)


def draw_scene_records(
    folder: Path, records_per_query: int, height: int, width: int, seed: int, task: Task = "segmentation"
) -> str:
    """Writes ``records.jsonl``, ``images/`` and ``masks/`` as `write_dataset` does.

    Renders ``records_per_query`` scenes on average for each of the eight queries.
    """

    def records(fresh: Path) -> Iterator[dict[str, Any]]:
        count = records_per_query * len(COLORS) * len(PARTS)
        # A random stream other than in pretraining, so that held-out scenes were never seen.
        scenes = draw_scenes(count, height, width, np.random.default_rng([seed, 0]))
        truths = scenes.truths
        for number, (query, box, center) in enumerate(zip(scenes.queries, boxes(truths), centers(truths), strict=True)):
            name = f"scene_{number:05d}"
            image, mask = f"{_IMAGES}/{name}.png", f"{_MASKS}/{name}.png"
            Image.fromarray(scenes.images[number]).save(fresh / image)
            Image.fromarray(truths[number].astype(np.uint8) * 255).save(fresh / mask)
            place = {"mask": mask, "box": box.tolist(), "points": [center.tolist()]}
            yield {"id": name, "image": image, "query": query_of(*query), **place}

    recipe = {
        "records_per_query": records_per_query,
        "height": height,
        "width": width,
        "seed": seed,
    }
    return write_dataset(folder, recipe, (_IMAGES, _MASKS), records)


ANSWER_PIECES = ('<answer>{"bbox":[', '],"points":[[', ']],"negative_points":[[', "]]}</answer>")
"""The texts around the numbers of an answer: a box, one positive and one negative point."""
_FRAME = [
    *(ANSWER_PIECES[0], *"0,0,0,0"),
    *(ANSWER_PIECES[1], *"0,0"),
    *(ANSWER_PIECES[2], *"0,0"),
    ANSWER_PIECES[3],
]
"""The texts of an answer's tokens in which every number is 0."""
NUMBER_PLACES = [place for place, text in enumerate(_FRAME) if text == "0"]
"""The positions of the numbers in an answer: 0-3 are the box, 4-5 the positive, 6-7 the negative point."""
ANSWER_LENGTH = len(_FRAME) + 1
"""Number of tokens of an answer, with the end token."""


def answer_tokens(tokenizer: PreTrainedTokenizerFast, numbers: Tensor) -> Tensor:
    """[b, ANSWER_LENGTH] token ids of answers with ``numbers`` [b, 8] int64."""
    frame = [*tokenizer.convert_tokens_to_ids(_FRAME), tokenizer.eos_token_id]
    answers = torch.tensor(frame).repeat(len(numbers), 1)
    answers[:, NUMBER_PLACES] = number_ids(tokenizer, int(numbers.max()) + 1)[numbers]
    return answers


def number_ids(tokenizer: PreTrainedTokenizerFast, count: int) -> Tensor:
    """[count] int64: the token id of each integer below ``count``."""
    return torch.tensor(tokenizer.convert_tokens_to_ids(list(map(str, range(count)))))
