"""The effect that negative points must have on the masks of any segmenter: a four-way ordering of IoUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from visual_grpo.common.geometry import Point
from visual_grpo.rewards.segmentation import PointPrompt, Segmenter


class Case(NamedTuple):
    image: Tensor
    """uint8 [3, H, W]."""
    truth: Tensor
    """bool [H, W]."""
    positives: tuple[Point, ...]
    right: Sequence[Point]
    """Negatives on the other part; each is used in a separate prompt, like the next two."""
    random: Sequence[Point]
    """Anywhere in the image."""
    wrong: Sequence[Point]
    """In the truth."""


def assert_ordered(segmenter: Segmenter, cases: Iterable[Case]) -> None:
    """Mean IoU: a negative on the other part > anywhere >= none > inside the truth."""
    means = torch.tensor([_overlaps(segmenter, case) for case in cases]).mean(0)
    right, random, none, wrong = means.tolist()
    assert right > random + 0.25
    assert random > none
    assert none > wrong + 0.2


def _overlaps(segmenter: Segmenter, case: Case) -> list[float]:
    kinds: list[list[tuple[Point, ...]]] = [[(point,) for point in case.right], [(point,) for point in case.random]]
    kinds += [[()], [(point,) for point in case.wrong]]
    prompts = [PointPrompt(positives=case.positives, negatives=some) for kind in kinds for some in kind]
    masks = segmenter.masks(segmenter.embed(case.image), prompts)
    overlaps = (masks & case.truth).sum((1, 2)) / (masks | case.truth).sum((1, 2))
    return [part.mean().item() for part in overlaps.split([len(kind) for kind in kinds])]
