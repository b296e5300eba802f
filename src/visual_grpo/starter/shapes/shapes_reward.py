"""Detects the object in images of rendered shapes, and rewards how closely it matches the requested one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_grpo.common.errors import UserError, counted
from visual_grpo.common.types import PromptRecord, RewardOutput, Sample
from visual_grpo.starter.shapes.render import AREAS, ATTRIBUTES, BACKGROUND, CENTERS, CHANGES, COLORS, RADII, VOCABULARY

_GRID = 64
"""Least number of cells along the shorter side of the grid on which images are judged, if they have as many pixels."""
_FINE_GRID = 128
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
    iou, center, radius = _fit_templates(objects)
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


def _fit_templates(objects: Objects) -> tuple[Tensor, Tensor, Tensor]:
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


class DrawnReward:
    """A reward of shapes that the records' metadata describe."""

    name: str

    def check_records(self, records: Sequence[PromptRecord]) -> None:
        """Raises UserError if a record's metadata do not describe an object."""
        others = [r.id for r in records if any(r.metadata.get(key) not in VOCABULARY[key] for key in ATTRIBUTES)]
        if others:
            shown = ", ".join(map(repr, others[:3])) + " ..." * (len(others) > 3)
            raise UserError(
                f"the reward {self.name!r} judges the shapes that the starter renders, by the metadata"
                f" {', '.join(ATTRIBUTES)}; {counted(len(others), 'record')} {'lacks' if len(others) == 1 else 'lack'}"
                f" them: {shown}. Use a reward that fits your data: reward=auto chooses one"
            )


def _score_prompts(objects: Objects, asked: Sequence[_Asked]) -> tuple[Tensor, Tensor]:
    """Values [B] and parts [B, 5]: the four attributes and all of them."""
    judged = judge(objects, torch.tensor([one.object for one in asked]))
    right = torch.cat([judged.right, judged.all_right[:, None]], 1).float()
    return (judged.closeness.sum(1) + right[:, -1]) / (len(ATTRIBUTES) + 1), right


def _score_edits(objects: Objects, asked: Sequence[_Asked]) -> tuple[Tensor, Tensor]:
    """Values [B] and parts [B, 7]: the four attributes, all, instructed, kept; NaN = nothing to judge.

    The value is the mean of followed, followed * kept and all correct, so that a copy of the source scores low.
    """
    regions = torch.tensor([one.regions for one in asked])
    subject = judge(restricted(objects, regions[:, 0]), torch.tensor([one.object for one in asked]))
    # Rows without a second object use the first one as a placeholder, which is ignored.
    other = judge(restricted(objects, regions[:, 1]), torch.tensor([one.other or one.object for one in asked]))
    has_other = torch.tensor([one.other is not None for one in asked])
    changed = torch.tensor([[CHANGES.get(str(one.edit)) == name for name in ATTRIBUTES] for one in asked])
    removes = torch.tensor([one.edit == "remove" for one in asked])
    followed, instructed = _instructed(subject, changed, removes)
    closeness, kept = _kept(subject, other, changed, has_other)
    all_right = instructed & kept
    kept_part = kept.float().where(changed.any(1) | has_other, torch.nan)
    attributes = _attributes(subject, other, removes, has_other)
    parts = torch.cat([attributes, torch.stack([all_right.float(), instructed.float(), kept_part], 1)], 1)
    return (followed + followed * closeness + all_right) / 3, parts


def _instructed(subject: Judged, changed: Tensor, removes: Tensor) -> tuple[Tensor, Tensor]:
    """Closeness [B] and correctness [B] of the changed attribute, the added object, or the removal."""
    attributes = changed.any(1)
    asked = torch.where(attributes[:, None], changed, True)
    followed = (subject.closeness * asked).sum(1) / asked.sum(1)
    right = (subject.right | ~asked).all(1)
    return torch.where(removes, subject.emptiness, followed), torch.where(removes, subject.empty, right)


def _kept(subject: Judged, other: Judged, changed: Tensor, has_other: Tensor) -> tuple[Tensor, Tensor]:
    """Closeness [B] and correctness [B] of the unchanged attributes or the other object; 1 if there is neither."""
    attributes = changed.any(1)
    rest = (subject.closeness * ~changed).sum(1) / (len(ATTRIBUTES) - 1)
    beside = torch.where(has_other, other.closeness.mean(1), 1.0)
    right = torch.where(attributes, (subject.right | changed).all(1), other.all_right | ~has_other)
    return torch.where(attributes, rest, beside), right


def _attributes(subject: Judged, other: Judged, removes: Tensor, has_other: Tensor) -> Tensor:
    """[B, 4]: 1 where an attribute is correct for all objects of the target, else 0; NaN if it has no object."""
    right = (subject.right | removes[:, None]) & (other.right | ~has_other[:, None])
    return right.float().masked_fill((removes & ~has_other)[:, None], torch.nan)


_PARTS = (*ATTRIBUTES, "all")
_EDIT_PARTS = ("instructed", "kept")


class ShapesReward(DrawnReward):
    """Closeness to the requested picture, 0..1, with parts that are 0 or 1. Images may have any size.

    Reads ``record.metadata``: ``color``, ``shape``, ``position``, ``size`` of the single object. The value is the mean
    of five terms: closeness of each attribute, and whether all are correct. A missing object scores 0. Parts:
    ``color``, ``shape``, ``position``, ``size``, ``all``.

    With ``edit`` (one of `EDITS`) these four describe the edited object as in the target or (``remove``) source;
    ``other`` is a second object at the opposite position, which must stay, or null. The value is the mean of
    three terms: how far the instruction was followed, that times how much of the rest was kept (so that a copy of the
    source scores low), and whether everything is correct. Additional parts: ``instructed`` and ``kept``, NaN if not
    applicable. ``"edit": null`` marks a text-to-image record in a dataset with edits.
    """

    name = "shapes"
    measure = ("all", "all right")

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> RewardOutput:
        asked = [_asked(record) for record in prompts]
        # The key counts, not its value: in a mixed dataset, batches without edits must have the same parts.
        names = _PARTS + (_EDIT_PARTS if any("edit" in record.metadata for record in prompts) else ())
        values, parts = torch.zeros(len(samples)), torch.full((len(samples), len(names)), torch.nan)
        for rows in _batchable_rows(samples, asked):
            objects, requests = find_objects(torch.stack([samples[i] for i in rows])), [asked[i] for i in rows]
            score = _score_prompts if requests[0].edit is None else _score_edits
            values_of_rows, parts_of_rows = score(objects, requests)
            values[rows], parts[rows, : parts_of_rows.shape[1]] = values_of_rows, parts_of_rows
        return RewardOutput(values=values, parts=dict(zip(names, parts.unbind(1), strict=True)))


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The request of a record; objects are indices into the vocabulary, in the order of ATTRIBUTES."""

    object: list[int]
    edit: str | None
    other: list[int] | None

    @property
    def regions(self) -> tuple[int, int]:
        """Regions of the object and of the other one, as indices into REGIONS."""
        if self.other is None:
            return 0, 0
        position, opposite = (VOCABULARY["position"][words[2]] for words in (self.object, self.other))
        return REGIONS.index(position), REGIONS.index(opposite)


def _asked(record: PromptRecord) -> _Asked:
    def words(described: Mapping[str, Any]) -> list[int]:
        return [VOCABULARY[key].index(described[key]) for key in ATTRIBUTES]

    edit, other = record.metadata.get("edit"), record.metadata.get("other")
    return _Asked(object=words(record.metadata), edit=edit, other=None if other is None else words(other))


def _batchable_rows(samples: Sequence[Tensor], asked: Sequence[_Asked]) -> list[list[int]]:
    """Groups rows that can be judged in one batch: same image size, and either all or none of them edits."""
    rows: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, (sample, one) in enumerate(zip(samples, asked, strict=True)):
        rows[(one.edit is None, *sample.shape)].append(i)
    return list(rows.values())


class RenderingReward(DrawnReward):
    """How cleanly an object is rendered, 0..1, whichever it is: the mean closeness of its colour to the nearest named
    one, times the square of how well formed the nearest shape is, at half of its height. Of two objects it is the
    mean, each in its half of the image. A missing object counts as 0, and a blank image as 1 if nothing was asked for.

    The square weighs outlines as much as colours: they have less room above the base model's. The reward differs
    between decodes of the same tokens, where ``shapes`` mostly judges what the tokens determine.
    """

    name = "rendering"

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> RewardOutput:
        return RewardOutput(values=torch.stack(list(map(_cleanness, prompts, samples))))


def _cleanness(record: PromptRecord, image: Tensor) -> Tensor:
    asked, objects = _asked(record), find_objects(image[None], _FINE_GRID)
    subject, other = asked.regions
    regions = [subject] * (asked.edit != "remove") + [other] * (asked.other is not None)
    parts = [restricted(objects, torch.tensor([region])) for region in regions or [REGIONS.index("whole")]]
    return torch.stack([torch.where(has_object(part), _clean(part), float(not regions))[0] for part in parts]).mean()


def _at_half_height(objects: Objects) -> Objects:
    """Returns the objects with masks that end at half of each object's mean colour distance from the background.

    The eye sees an outline there. At a fixed distance, an outline would move outwards as its colour gets stronger.
    """
    inside, distance = _inside(objects), (objects.rgb - torch.tensor(BACKGROUND) / 255).square().sum(-1).sqrt()
    height = (distance * inside).sum((1, 2)) / inside.sum((1, 2)).clamp(min=1)
    return replace(objects, mask=objects.mask & (distance > height[:, None, None] / 2))


def _clean(objects: Objects) -> Tensor:
    iou, _, _ = _fit_templates(_at_half_height(objects))
    return nearness(objects, color_distances(objects).amin(-1)) * well_formed(iou.amax(1)).square()
