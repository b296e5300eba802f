"""Detects the object in images of rendered shapes, and judges how closely it matches the requested one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_grpo.starter.shapes.render import AREAS, BACKGROUND, CENTERS, COLORS, RADII

_GRID = 64
"""Least number of cells along the shorter side of the grid on which images are judged, if they have as many pixels."""
FINE_GRID = 128
"""The same where outlines are judged."""
_OBJECT = 0.3
"""RGB distance (0..1 per channel) from the background above which a cell belongs to the object."""
_MIN_AREA = 0.006
"""Area that an object exceeds, as a share of the square of the shorter side."""
_CLEAR_AREA = 0.05
"""The same, at which emptiness is 0; smaller than the smallest shape."""
_COLOR_REACH = 0.6
"""RGB distance at which the closeness of a colour is 0."""
_COLOR_MATCH = 0.25
"""Maximum RGB distance at which a cell counts as having the requested colour, if no other named colour is nearer."""
_MIN_COLOR_SHARE = 0.9
_IOU_REACH = 0.3
"""1 minus the intersection over union with the template at which the closeness of a shape is 0."""
_MIN_IOU = 0.85
_CLEAR_MARGIN = 0.15
"""Margin of a true circle: its intersection over union with the asked template minus that with the best other one."""
_MIN_MARGIN = 0.07
"""The same for a shape that a person calls right: a square with rounded corners lies below it, and is neither."""
_MAX_OFFSET = 0.1
"""Maximum distance of a correct centre from the requested one, as a share of the shorter side."""
REGIONS = ("whole", "left", "right", "top", "bottom")
"""Parts of an image in which an object is looked for."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The judgement of B images, or of regions of them."""

    closeness: Tensor
    """[B, 4] in 0..1: how closely each attribute matches; 0 if no object was found."""
    right: Tensor
    """[B, 4] bool: whether each attribute counts as correct."""
    emptiness: Tensor
    """[B] in 0..1: 1 if nothing was found, decreasing to 0 for a small object."""
    empty: Tensor
    """[B] bool: nothing large enough to be an object was found."""

    @property
    def all_right(self) -> Tensor:
        return self.right.all(1)


@dataclass(frozen=True, kw_only=True)
class Objects:
    """B images on the judging grid of h x w cells; lengths are shares of the shorter side."""

    rgb: Tensor
    """[B, h, w, 3] in 0..1."""
    mask: Tensor
    """[B, h, w] bool."""
    x: Tensor
    """[w] cell centres."""
    y: Tensor
    """[h] cell centres."""
    size: tuple[int, int]
    """(height, width) of the images in pixels."""

    @property
    def area(self) -> Tensor:
        """[B]: the objects' area, as a share of the square of the shorter side."""
        return self.mask.sum((1, 2)) * (self.x[1] - self.x[0]).square()


def find_objects(images: Tensor, grid: int = _GRID) -> Objects:
    """Finds the objects in images, uint8 [B, 3, H, W]."""
    height, width = images.shape[-2:]
    short = min(height, width)
    # Whole pixels in a cell: windows that overlap would let shapes grow by a cell on some sides.
    pixels = max(1, short // grid)
    rgb = F.avg_pool2d(images.float() / 255, pixels).permute(0, 2, 3, 1)
    mask = (rgb - torch.tensor(BACKGROUND) / 255).square().sum(-1) > _OBJECT**2
    y, x = ((torch.arange(count) + 0.5) * (pixels / short) for count in rgb.shape[1:3])
    return Objects(rgb=rgb, mask=mask, x=x, y=y, size=(height, width))


def restricted(objects: Objects, region: Tensor) -> Objects:
    """The same images with each mask restricted to ``region`` ([B] int64, index into REGIONS)."""
    left, top = objects.x < objects.x.mean(), objects.y < objects.y.mean()
    wide, high = left[None, :].expand(len(top), -1), top[:, None].expand(-1, len(left))
    regions = torch.stack([torch.ones_like(wide), wide, ~wide, high, ~high])
    return replace(objects, mask=objects.mask & regions[region])


def judge(objects: Objects, asked: Tensor) -> Judged:
    """Compares each image's object with ``asked``: [B, 4] int64, indices into the VOCABULARY of each attribute."""
    color, shape, position, size = asked.unbind(1)
    iou, center, radius = fit_templates(objects)
    best = iou.argmax(1)
    judged = [
        _color(objects, color),
        _shape(iou, shape),
        _position(_pick(center, best), position, objects.size),
        _size(_pick(radius, best), size),
    ]
    present = has_object(objects)
    return Judged(
        closeness=torch.stack([close for close, _ in judged], 1) * present[:, None],
        right=torch.stack([ok for _, ok in judged], 1) & present[:, None],
        emptiness=(1 - objects.area / _CLEAR_AREA).clamp(min=0),
        empty=~present,
    )


def nearness(objects: Objects, distances: Tensor) -> Tensor:
    """[B]: max(0, 1 - distance / reach), averaged over the inside of each object; ``distances`` is [B, h, w]."""
    inside = _inside(objects)
    return ((1 - distances / _COLOR_REACH).clamp(min=0) * inside).sum((1, 2)) / inside.sum((1, 2)).clamp(min=1)


def color_distances(objects: Objects) -> Tensor:
    """[B, h, w, colours] RGB distance of every cell to every named colour."""
    names = torch.tensor(list(COLORS.values())) / 255
    return torch.cdist(objects.rgb.flatten(1, 2), names).view(*objects.mask.shape, len(names))


def has_object(objects: Objects) -> Tensor:
    """[B] bool."""
    return objects.area > _MIN_AREA


def _inside(objects: Objects) -> Tensor:
    """[B, h, w]: 1 inside the object except its border, where anti-aliased cells are mixed with the background."""
    outside = (~objects.mask).float()[:, None]
    return (F.max_pool2d(outside, 3, stride=1, padding=1)[:, 0] < 0.5).float()


def _color(objects: Objects, asked: Tensor) -> tuple[Tensor, Tensor]:
    """Mean closeness to the requested colour inside the object, and whether most of it has that colour."""
    inside, distances = _inside(objects), color_distances(objects)
    distance = distances[torch.arange(len(asked)), ..., asked]
    matches = (distances.argmin(-1) == asked[:, None, None]) & (distance < _COLOR_MATCH)
    share = (matches * inside).sum((1, 2)) / inside.sum((1, 2)).clamp(min=1)
    return nearness(objects, distance), share > _MIN_COLOR_SHARE


def fit_templates(objects: Objects) -> tuple[Tensor, Tensor, Tensor]:
    """Compares each object with a template of each shape that has the object's area and centroid.

    Returns the intersection over union [B, 3], the templates' centres [B, 3, 2] and radii [B, 3].
    """
    mask = objects.mask.float()
    count, area = mask.sum((1, 2)).clamp(min=1), objects.area
    centroid_x = (mask.sum(1) * objects.x).sum(1) / count
    centroid_y = (mask.sum(2) * objects.y).sum(1) / count
    radius = torch.stack([(area / unit).sqrt() for unit in AREAS.values()], 1)
    above = centroid_y - radius[:, 2] / 3  # A triangle's centroid is below its centre.
    center_y = torch.stack([centroid_y, centroid_y, above], 1)
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


def well_formed(iou: Tensor) -> Tensor:
    """Closeness 0..1 of outlines to a template, from intersections over union; only a perfect one has 1."""
    return (1 - (1 - iou) / _IOU_REACH).clamp(min=0)


def _shape(iou: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean of form and clarity of the asked shape, and whether a person calls it right."""
    of_asked = _pick(iou, asked)
    margin = of_asked - iou.scatter(1, asked[:, None], 0).amax(1)
    clear = (margin / _CLEAR_MARGIN).clamp(0, 1)
    return (well_formed(of_asked) + clear) / 2, (of_asked > _MIN_IOU) & (margin > _MIN_MARGIN)


def _position(center: Tensor, asked: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    height, width = size
    places = torch.tensor(list(CENTERS.values())) * torch.tensor([width, height]) / min(height, width)
    distance = torch.cdist(center, places)
    offset = _pick(distance, asked)
    return (1 - (offset - 0.02) / 0.25).clamp(0, 1), (distance.argmin(1) == asked) & (offset < _MAX_OFFSET)


def _size(radius: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    radii = torch.tensor(list(RADII.values()))
    distance = (radius[:, None] - radii).abs()
    return (1 - (_pick(distance, asked) - 0.01) / 0.1).clamp(0, 1), distance.argmin(1) == asked


def _pick(table: Tensor, column: Tensor) -> Tensor:
    """``table[i, column[i]]`` for every row i."""
    return table[torch.arange(len(table)), column]


def at_half_height(objects: Objects) -> Objects:
    """Returns the objects with masks that end at half of each object's mean colour distance from the background.

    The eye sees an outline there. At a fixed distance, an outline would move outwards as its colour gets stronger.
    """
    inside, distance = _inside(objects), (objects.rgb - torch.tensor(BACKGROUND) / 255).square().sum(-1).sqrt()
    height = (distance * inside).sum((1, 2)) / inside.sum((1, 2)).clamp(min=1)
    return replace(objects, mask=objects.mask & (distance > height[:, None, None] / 2))
