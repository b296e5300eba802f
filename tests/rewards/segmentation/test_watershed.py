from __future__ import annotations

import pytest
import torch
from torch import Tensor

from visual_grpo.common.geometry import Point
from visual_grpo.rewards.segmentation import PointPrompt
from visual_grpo.rewards.segmentation.watershed import WatershedSegmenter


def minimax(image: Tensor, x: int, y: int) -> Tensor:
    """int64 [H, W]: smallest maximum squared colour edge on a path to pixel (x, y), by relaxation to a fixed point."""
    colours = image.long()
    beside = (colours[:, :, 1:] - colours[:, :, :-1]).square().sum(0)
    below = (colours[:, 1:] - colours[:, :-1]).square().sum(0)
    least = torch.full(image.shape[1:], 10**9)
    least[y, x] = 0
    while True:
        before = least.clone()
        least[:, 1:] = torch.minimum(least[:, 1:], torch.maximum(before[:, :-1], beside))
        least[:, :-1] = torch.minimum(least[:, :-1], torch.maximum(before[:, 1:], beside))
        least[1:] = torch.minimum(least[1:], torch.maximum(before[:-1], below))
        least[:-1] = torch.minimum(least[:-1], torch.maximum(before[1:], below))
        if torch.equal(before, least):
            return least


def slow_mask(image: Tensor, prompt: PointPrompt, edge: float) -> Tensor:
    def nearest(points: tuple[Point, ...]) -> Tensor:
        far = torch.full(image.shape[1:], 10**9)
        return torch.stack([far, *(minimax(image, int(x), int(y)) for x, y in points)]).amin(0)

    to_positive = nearest(prompt.positives)
    return (to_positive < nearest(prompt.negatives)) & (to_positive.sqrt() / 255 < edge)


@pytest.mark.parametrize("levels", [2, 4, 256], ids=["flat regions", "many ties", "few ties"])
def test_masks_equal_a_reference_watershed_to_the_pixel(levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    segmenter = WatershedSegmenter(edge=0.6)
    shares = []
    for _ in range(12):
        image = (torch.randint(levels, (3, 9, 14), generator=generator) * (255 // (levels - 1))).to(torch.uint8)
        xs, ys = (torch.randint(side, (5,), generator=generator).tolist() for side in (14, 9))
        points = list(zip(xs, ys, strict=True))
        prompts = [
            PointPrompt(positives=(points[0],)),
            PointPrompt(positives=(points[0],), negatives=(points[1],)),
            PointPrompt(positives=(points[1],), negatives=(points[0],)),
            PointPrompt(positives=(points[0], points[2]), negatives=(points[1], points[3], points[4])),
        ]
        masks = segmenter.masks(segmenter.embed(image), prompts)
        for mask, prompt in zip(masks, prompts, strict=True):
            assert torch.equal(mask, slow_mask(image, prompt, 0.6))
            shares.append(mask.float().mean().item())
    assert len(set(shares)) > 3, "the prompts must give different masks"


def test_an_edge_as_large_as_the_limit_is_not_crossed() -> None:
    image = torch.zeros(3, 1, 2, dtype=torch.uint8)
    image[0, 0, 1] = 51
    prompt = PointPrompt(positives=((0, 0),))
    widths = [int(s.masks(s.embed(image), [prompt]).sum()) for s in map(WatershedSegmenter, (0.2, 0.2001))]
    assert widths == [1, 2]


def test_points_are_rounded_and_kept_inside_an_image_that_is_no_square() -> None:
    generator = torch.Generator().manual_seed(3)
    image = torch.randint(256, (3, 5, 9), generator=generator, dtype=torch.uint8)
    segmenter = WatershedSegmenter(edge=0.01)  # Every pixel is a separate object.
    points = [(8.0, 4.0), (7.6, 3.7), (20.0, 99.0), (-4.0, 2.2)]
    masks = segmenter.masks(segmenter.embed(image), [PointPrompt(positives=(point,)) for point in points])
    assert [mask.nonzero().tolist() for mask in masks] == [[[4, 8]], [[4, 8]], [[4, 8]], [[2, 0]]]
