"""Judges drawn shapes: is the image's one object of the asked colour, shape, position and size?"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.shapes_world import ATTRIBUTES, BACKGROUND, CENTERS, COLORS, RADII, SHAPES
from visual_grpo.types import PromptRecord, RewardOutput, Sample

_GRID = 64
"""Images are judged with this many cells along their shorter side."""
_OBJECT = 0.3
"""RGB distance (0..1 a channel) from the background above which a cell belongs to the object."""
_MIN_CELLS = 25
_COLOR_REACH = 0.6
"""RGB distance at which a cell's colour is worth nothing."""
_COLOR_MATCH = 0.25
"""RGB distance within which a cell may count as of the asked colour, if no other named colour is nearer."""
_MIN_COLOR_SHARE = 0.7
_MIN_IOU = 0.7
_MAX_OFFSET = 0.1
"""Farthest that a centre may be from the asked one, in shorter sides."""
_VOCABULARY: Mapping[str, tuple[str, ...]] = {
    "color": tuple(COLORS),
    "shape": SHAPES,
    "position": tuple(CENTERS),
    "size": tuple(RADII),
}


class ShapesReward:
    """Mean of five values in 0..1: closeness of each attribute, and whether all four are right.

    Reads ``record.metadata`` (color, shape, position, size). Parts are 0 or 1: ``color``, ``shape``, ``position``,
    ``size``, ``all``. The images may have any size; a missing object scores 0.
    """

    name = "shapes"
    needs_target = False

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> RewardOutput:
        asked = torch.tensor([_asked(record) for record in prompts])
        values, parts = torch.zeros(len(samples)), torch.zeros(len(samples), len(ATTRIBUTES) + 1)
        for rows in _rows_by_size(samples):
            values[rows], parts[rows] = _judge(torch.stack([samples[i] for i in rows]), asked[rows])
        return RewardOutput(values=values, parts=dict(zip((*ATTRIBUTES, "all"), parts.unbind(1), strict=True)))


def _asked(record: PromptRecord) -> list[int]:
    """Indices into the vocabulary, in the order of ATTRIBUTES."""
    missing = [key for key in ATTRIBUTES if key not in record.metadata]
    if missing:
        raise UserError(
            f"reward 'shapes': record {record.id!r} lacks metadata {', '.join(missing)};"
            f" it needs {', '.join(ATTRIBUTES)} (choose another reward for prompts that are not drawn shapes)"
        )
    indices = []
    for key in ATTRIBUTES:
        if record.metadata[key] not in _VOCABULARY[key]:
            raise UserError(
                f"reward 'shapes': record {record.id!r} has {key} {record.metadata[key]!r};"
                f" expected one of {', '.join(_VOCABULARY[key])}"
            )
        indices.append(_VOCABULARY[key].index(record.metadata[key]))
    return indices


def _rows_by_size(samples: Sequence[Tensor]) -> list[list[int]]:
    rows: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, sample in enumerate(samples):
        rows[tuple(sample.shape)].append(i)
    return list(rows.values())


@dataclass(frozen=True, kw_only=True)
class _Objects:
    """B images on the judging grid of h x w cells; lengths in shorter sides."""

    rgb: Tensor
    """[B, h, w, 3] in 0..1."""
    mask: Tensor
    """[B, h, w] bool: cells that belong to the object."""
    x: Tensor
    """[w] cell centres; likewise ``y`` [h]."""
    y: Tensor


def _judge(images: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [B, 3, H, W], [B, 4] -> values [B] and parts [B, 5]."""
    objects = _find(images)
    color, shape, position, size = asked.unbind(1)
    iou, center, radius = _fit_templates(objects)
    best = iou.argmax(1)
    judged = [
        _color(objects, color),
        _shape(iou, best, shape),
        _position(_of(center, best), position, images.shape[-2:]),
        _size(_of(radius, best), size),
    ]
    found = objects.mask.sum((1, 2)) > _MIN_CELLS
    closeness = torch.stack([close for close, _ in judged], 1) * found[:, None]
    right = torch.stack([ok for _, ok in judged], 1) & found[:, None]
    parts = torch.cat([right, right.all(1, keepdim=True)], 1).float()
    return (closeness.sum(1) + parts[:, -1]) / (len(ATTRIBUTES) + 1), parts


def _find(images: Tensor) -> _Objects:
    height, width = images.shape[-2:]
    short = min(height, width)
    cells = (round(_GRID * height / short), round(_GRID * width / short))
    rgb = F.interpolate(images.float() / 255, size=cells, mode="area").permute(0, 2, 3, 1)
    mask = (rgb - torch.tensor(BACKGROUND) / 255).square().sum(-1) > _OBJECT**2
    y, x = ((torch.arange(count) + 0.5) / _GRID for count in cells)
    return _Objects(rgb=rgb, mask=mask, x=x, y=y)


def _color(objects: _Objects, asked: Tensor) -> tuple[Tensor, Tensor]:
    """Mean closeness to the asked colour inside the object, and whether most of it is near that colour.

    The object's rim is left out: anti-aliased cells there are mixed with the background.
    """
    outside = (~objects.mask).float()[:, None]
    inside = (F.max_pool2d(outside, 3, stride=1, padding=1)[:, 0] < 0.5).float()
    names = torch.tensor(list(COLORS.values())) / 255
    distances = torch.cdist(objects.rgb.flatten(1, 2), names).view(*objects.mask.shape, len(names))
    distance = distances[torch.arange(len(asked)), ..., asked]
    matches = (distances.argmin(-1) == asked[:, None, None]) & (distance < _COLOR_MATCH)
    count = inside.sum((1, 2)).clamp(min=1)
    closeness = ((1 - distance / _COLOR_REACH).clamp(min=0) * inside).sum((1, 2)) / count
    share = (matches * inside).sum((1, 2)) / count
    return closeness, share > _MIN_COLOR_SHARE


def _fit_templates(objects: _Objects) -> tuple[Tensor, Tensor, Tensor]:
    """Each shape of the object's own area and centroid laid over it.

    Returns the intersection over union [B, 3], the templates' centres [B, 3, 2] and radii [B, 3].
    """
    mask = objects.mask.float()
    count = mask.sum((1, 2)).clamp(min=1)
    centroid_x = (mask.sum(1) * objects.x).sum(1) / count
    centroid_y = (mask.sum(2) * objects.y).sum(1) / count
    area = count / _GRID**2
    radius = torch.stack([(area / math.pi).sqrt(), area.sqrt() / 2, (area / 2).sqrt()], 1)
    center_y = torch.stack([centroid_y, centroid_y, centroid_y - radius[:, 2] / 3], 1)  # a triangle's mass hangs low
    center = torch.stack([centroid_x[:, None].expand(-1, 3), center_y], -1)
    dx = objects.x[None, None, :] - centroid_x[:, None, None]
    dy = objects.y[None, :, None] - center_y[:, :, None, None]
    circle = dx.square() + dy[:, 0].square() < radius[:, 0, None, None].square()
    square = torch.maximum(dx.abs(), dy[:, 1].abs()) < radius[:, 1, None, None]
    below_apex = dy[:, 2] + radius[:, 2, None, None]
    triangle = (dx.abs() < below_apex / 2) & (dy[:, 2] < radius[:, 2, None, None])
    templates = torch.stack([circle, square, triangle], 1)
    shared = (templates & objects.mask[:, None]).sum((2, 3))
    either = (templates | objects.mask[:, None]).sum((2, 3)).clamp(min=1)
    return shared / either, center, radius


def _shape(iou: Tensor, best: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    own = _of(iou, asked)
    matches = best == asked
    return 0.5 * (own / 0.9).clamp(max=1) + 0.5 * matches, matches & (own > _MIN_IOU)


def _position(center: Tensor, asked: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    height, width = size
    places = torch.tensor(list(CENTERS.values())) * torch.tensor([width, height]) / min(height, width)
    distance = torch.cdist(center, places)
    own = _of(distance, asked)
    return (1 - (own - 0.02) / 0.25).clamp(0, 1), (distance.argmin(1) == asked) & (own < _MAX_OFFSET)


def _size(radius: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    radii = torch.tensor(list(RADII.values()))
    distance = (radius[:, None] - radii).abs()
    return (1 - (_of(distance, asked) - 0.01) / 0.1).clamp(0, 1), distance.argmin(1) == asked


def _of(table: Tensor, column: Tensor) -> Tensor:
    """Row i's entry ``column[i]``."""
    return table[torch.arange(len(table)), column]
