"""A trained SAM 2 behind the protocol: the same four-way ordering as the watershed's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.segmentation.trained_sam2 import draw_discs, pick, save_trained_sam2
from visual_grpo.segmentation.geometry import ious
from visual_grpo.segmentation.sam2 import Sam2Segmenter
from visual_grpo.segmentation.segmenter import Point, PointPrompt


def points_in(mask: Tensor, count: int, generator: torch.Generator) -> list[Point]:
    return [(x, y) for x, y in pick(mask[None], count, generator)[0].tolist()]


@pytest.mark.slow
def test_a_negative_helps_where_it_is_right_and_hurts_in_the_object(tmp_path: Path) -> None:
    """On the other part > anywhere >= none > inside the truth, on scenes that were not trained on."""
    segmenter = Sam2Segmenter(str(save_trained_sam2(tmp_path)), device="cpu")
    generator = torch.Generator().manual_seed(99)
    found = []
    for image, target, other in zip(*draw_discs(64, generator), strict=True):
        (inside,) = points_in(target, 1, generator)
        negatives: dict[str, list[tuple[Point, ...]]] = {
            "right": [(point,) for point in points_in(other, 8, generator)],
            "random": [(point,) for point in points_in(torch.ones_like(target), 32, generator)],
            "none": [()],
            "wrong": [(point,) for point in points_in(target, 8, generator)],
        }
        prompts = [PointPrompt(positives=(inside,), negatives=some) for kind in negatives.values() for some in kind]
        overlaps = ious(segmenter.masks(segmenter.embed(image), prompts), target)
        found.append([part.mean().item() for part in overlaps.split([len(kind) for kind in negatives.values()])])
    right, random, none, wrong = torch.tensor(found).mean(0).tolist()
    assert right > random + 0.25
    assert random > none
    assert none > wrong + 0.2
