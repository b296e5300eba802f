"""Judges drawn shapes: does the image show what a prompt asked for, or what an edit should have made of its source?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.starter.shapes.edit_judge import score_edits
from visual_grpo.starter.shapes.judge import REGIONS, Objects, find_objects, judge, restricted
from visual_grpo.starter.shapes.world import ATTRIBUTES, EDITS, OPPOSITE, VOCABULARY
from visual_grpo.types import PromptRecord, RewardOutput, Sample

_PARTS = (*ATTRIBUTES, "all")
_EDIT_PARTS = ("instructed", "kept")


class ShapesReward:
    """Closeness to what was asked for, 0..1, and parts that are 0 or 1. The images may have any size.

    Reads ``record.metadata``: ``color``, ``shape``, ``position``, ``size`` of the image's one object, and the value is
    the mean of five: closeness of each attribute, and whether all are right. A missing object scores 0. Parts:
    ``color``, ``shape``, ``position``, ``size``, ``all``.

    With ``edit`` (one of `EDITS`) those four are of the object that the edit is about, as the target shows it or, for
    ``remove``, as it was; ``other`` is a second object at the opposite place, which must stay, or null. The value is
    the mean of three: how far the instruction was followed, the same times how much else was kept (so that a copy of
    the source is worth little), and whether all is right. Further parts: ``instructed`` and ``kept``; NaN where
    there is nothing to say. ``"edit": null`` marks a text-to-image record that shares a dataset with edits.
    """

    name = "shapes"
    needs_target = False

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> RewardOutput:
        asked = [_asked(record) for record in prompts]
        # By the key, not by its value: in a mixed dataset batches without edits must have the same parts.
        names = _PARTS + (_EDIT_PARTS if any("edit" in record.metadata for record in prompts) else ())
        values, parts = torch.zeros(len(samples)), torch.full((len(samples), len(names)), torch.nan)
        for rows in _alike(samples, asked):
            objects, own = find_objects(torch.stack([samples[i] for i in rows])), [asked[i] for i in rows]
            scored = _score_prompts(objects, own) if own[0].edit is None else _score_edits(objects, own)
            values[rows], parts[rows, : scored[1].shape[1]] = scored
        return RewardOutput(values=values, parts=dict(zip(names, parts.unbind(1), strict=True)))


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What a record asks for; objects as indices into the vocabulary, in the order of ATTRIBUTES."""

    object: list[int]
    edit: str | None
    other: list[int] | None

    @property
    def regions(self) -> tuple[int, int]:
        """Where to look for the object and for the other one, as indices into REGIONS."""
        if self.other is None:
            return 0, 0
        own, opposite = (VOCABULARY["position"][words[2]] for words in (self.object, self.other))
        return REGIONS.index(own), REGIONS.index(opposite)


def _score_prompts(objects: Objects, asked: Sequence[_Asked]) -> tuple[Tensor, Tensor]:
    """Values [B] and parts [B, 5]."""
    judged = judge(objects, torch.tensor([own.object for own in asked]))
    right = torch.cat([judged.right, judged.all_right[:, None]], 1).float()
    return (judged.closeness.sum(1) + right[:, -1]) / (len(ATTRIBUTES) + 1), right


def _score_edits(objects: Objects, asked: Sequence[_Asked]) -> tuple[Tensor, Tensor]:
    """Values [B] and parts [B, 7]."""
    regions = torch.tensor([own.regions for own in asked])
    subject = judge(restricted(objects, regions[:, 0]), torch.tensor([own.object for own in asked]))
    # Without another object its place is taken by the first; `score_edits` leaves it out.
    other = judge(restricted(objects, regions[:, 1]), torch.tensor([own.other or own.object for own in asked]))
    has_other = torch.tensor([own.other is not None for own in asked])
    return score_edits(subject, other, has_other, [str(own.edit) for own in asked])


def _asked(record: PromptRecord) -> _Asked:
    own, edit, other = _words(record, record.metadata), record.metadata.get("edit"), record.metadata.get("other")
    if edit is not None and edit not in EDITS:
        raise UserError(f"reward 'shapes': record {record.id!r} has edit {edit!r}; expected one of {', '.join(EDITS)}")
    if other is None:
        return _Asked(object=own, edit=edit, other=None)
    if edit not in ("add", "remove"):
        raise UserError(
            f"reward 'shapes': record {record.id!r} has other {other!r}, which only add and remove may have"
        )
    if not isinstance(other, Mapping):
        raise UserError(f"reward 'shapes': record {record.id!r} has other {other!r}; expected an object or null")
    words = _words(record, other, "other ")
    if OPPOSITE.get(record.metadata["position"]) != other["position"]:
        raise UserError(
            f"reward 'shapes': record {record.id!r} has objects at {record.metadata['position']!r} and"
            f" {other['position']!r}; two objects are told apart only at left and right or top and bottom"
        )
    return _Asked(object=own, edit=edit, other=words)


def _words(record: PromptRecord, described: Mapping[str, Any], whose: str = "") -> list[int]:
    """An object's attributes as indices into the vocabulary."""
    missing = [whose + key for key in ATTRIBUTES if key not in described]
    if missing:
        raise UserError(
            f"reward 'shapes': record {record.id!r} lacks metadata {', '.join(missing)};"
            f" it needs {', '.join(ATTRIBUTES)} (choose another reward for prompts that are not drawn shapes)"
        )
    for key in ATTRIBUTES:
        if described[key] not in VOCABULARY[key]:
            raise UserError(
                f"reward 'shapes': record {record.id!r} has {whose}{key} {described[key]!r};"
                f" expected one of {', '.join(VOCABULARY[key])}"
            )
    return [VOCABULARY[key].index(described[key]) for key in ATTRIBUTES]


def _alike(samples: Sequence[Tensor], asked: Sequence[_Asked]) -> list[list[int]]:
    """Rows that can be judged together: of one size, and all of them edits or none."""
    rows: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, (sample, own) in enumerate(zip(samples, asked, strict=True)):
        rows[(own.edit is None, *sample.shape)].append(i)
    return list(rows.values())
