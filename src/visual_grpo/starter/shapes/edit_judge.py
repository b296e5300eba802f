"""Scores edits of drawn shapes: was the instruction followed, and was everything else preserved?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from visual_grpo.starter.shapes.judge import Judged
from visual_grpo.starter.shapes.world import ATTRIBUTES, CHANGES


def score_edits(subject: Judged, other: Judged, has_other: Tensor, kinds: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Values [B] in 0..1 and parts [B, 7]: the four attributes, all, instructed, kept; NaN = nothing to judge.

    ``subject`` is the object that is edited by an edit of kind ``kinds[i]``; ``other``, where ``has_other`` ([B] bool),
    is the second object of the scene. The value is the mean of followed, followed * kept and all correct, so that a
    copy of the source scores low.
    """
    changed = torch.tensor([[CHANGES.get(kind) == name for name in ATTRIBUTES] for kind in kinds])
    removes = torch.tensor([kind == "remove" for kind in kinds])
    followed, instructed = _instructed(subject, changed, removes)
    closeness, kept = _kept(subject, other, changed, has_other)
    all_right = instructed & kept
    keeps_something = changed.any(1) | has_other
    parts = torch.cat(
        [
            _attributes(subject, other, removes, has_other),
            torch.stack([all_right.float(), instructed.float(), kept.float().where(keeps_something, torch.nan)], 1),
        ],
        1,
    )
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
