"""Rewards of rendered shapes: how closely the object matches the requested one, and how cleanly it is rendered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visual_grpo.common.errors import UserError, counted
from visual_grpo.common.types import PromptRecord, RewardOutput, Sample
from visual_grpo.starter.shapes.judging import (
    FINE_GRID,
    REGIONS,
    Judged,
    Objects,
    at_half_height,
    color_distances,
    find_objects,
    fit_templates,
    has_object,
    judge,
    nearness,
    restricted,
    well_formed,
)
from visual_grpo.starter.shapes.render import ATTRIBUTES, CHANGES, VOCABULARY

_PARTS = (*ATTRIBUTES, "all")
_EDIT_PARTS = ("instructed", "kept")


class DrawnReward:
    """A reward of shapes that the records' metadata describe."""

    def check_records(self, records: Sequence[PromptRecord]) -> None:
        others = [r.id for r in records if any(r.metadata.get(key) not in VOCABULARY[key] for key in ATTRIBUTES)]
        if others:
            shown = ", ".join(map(repr, others[:3])) + " ..." * (len(others) > 3)
            raise UserError(
                f"the rewards of the world shapes judge what the starter renders, by the metadata"
                f" {', '.join(ATTRIBUTES)}; {counted(len(others), 'record')} {'lacks' if len(others) == 1 else 'lack'}"
                f" them: {shown}. Leave these rewards out; for a training, reward=auto chooses others by the records"
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

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> RewardOutput:
        return RewardOutput(values=torch.stack(list(map(_cleanness, prompts, samples))))


def _cleanness(record: PromptRecord, image: Tensor) -> Tensor:
    asked, objects = _asked(record), find_objects(image[None], FINE_GRID)
    subject, other = asked.regions
    regions = [subject] * (asked.edit != "remove") + [other] * (asked.other is not None)
    parts = [restricted(objects, torch.tensor([region])) for region in regions or [REGIONS.index("whole")]]
    return torch.stack([torch.where(has_object(part), _clean(part), float(not regions))[0] for part in parts]).mean()


def _clean(objects: Objects) -> Tensor:
    iou, _, _ = fit_templates(at_half_height(objects))
    return nearness(objects, color_distances(objects).amin(-1)) * well_formed(iou.amax(1)).square()
