from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Generator, Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.geometry import Pixel, box_of, edge, inner_points, multimask, ring

HEIGHT, WIDTH = 60, 90
TRUTH = torch.zeros(HEIGHT, WIDTH, dtype=torch.bool)
TRUTH[20:40, 30:50] = True
TRUTH[20:25, 30:35] = False
READINGS = torch.zeros(3, HEIGHT, WIDTH, dtype=torch.bool)
READINGS[0] = TRUTH
READINGS[1, 20:40, 30:70] = True
READINGS[2, 5:40, 30:50] = True
SCORES = torch.tensor([0.4, 0.9, 0.3])
MANY = 10_000

Generate = Callable[[int, Generator, float], list[Pixel]]
GENERATORS: dict[str, Generate] = {
    "ring": lambda count, g, spacing: ring(TRUTH, box_of(TRUTH), count, g, margin=6, spacing=spacing),
    "edge": lambda count, g, spacing: edge(TRUTH, count, g, width=2, spacing=spacing),
    "multimask": lambda count, g, spacing: multimask(TRUTH, READINGS, SCORES, count, g, spacing=spacing),
}


def seeded(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


def filled(points: list[Pixel]) -> Tensor:
    """Bool [H, W]: True at the points."""
    mask = torch.zeros_like(TRUTH)
    for x, y in points:
        assert not mask[y, x], "no pixel twice"
        mask[y, x] = True
    return mask


def test_all_points_by_hand() -> None:
    """A ring is the grown box, an edge as wide as asked, and multimask in the masks that are not the best."""
    grown = torch.zeros_like(TRUTH)
    grown[14:46, 24:56] = True
    y, x = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")
    pixels = TRUTH.nonzero()
    away = ((y[..., None] - pixels[:, 0]) ** 2 + (x[..., None] - pixels[:, 1]) ** 2).amin(-1)
    expected = {"ring": grown, "edge": away <= 4, "multimask": READINGS[0] | READINGS[2]}
    for name, generate in GENERATORS.items():
        assert torch.equal(filled(generate(MANY, seeded(), 0)), expected[name] & ~TRUTH), name


@pytest.mark.parametrize("name", GENERATORS)
def test_points_keep_their_distance_and_fill_the_allowed_area(name: str) -> None:
    points = torch.tensor(GENERATORS[name](MANY, seeded(), 5.0)).float()
    everything = torch.tensor(GENERATORS[name](MANY, seeded(), 0)).float()
    between = torch.cdist(points, points) + torch.eye(len(points)) * 100
    assert between.min() >= 5
    assert torch.cdist(everything, points).amin(1).max() < 5
    assert (between.amin(1) < 8).any(), "as near as that is allowed"


@pytest.mark.parametrize("name", GENERATORS)
def test_no_more_points_than_asked_and_the_same_for_the_same_seed(name: str) -> None:
    generate = GENERATORS[name]
    assert len(generate(3, seeded(), 2.0)) == 3
    assert generate(0, seeded(), 2.0) == []
    assert generate(3, seeded(), 2.0) == generate(3, seeded(), 2.0) != generate(3, seeded(1), 2.0)


def block(x1: int, y1: int, x2: int, y2: int, height: int = 20, width: int = 30) -> torch.Tensor:
    """A rectangle with inclusive corners."""
    mask = torch.zeros(height, width, dtype=torch.bool)
    mask[y1 : y2 + 1, x1 : x2 + 1] = True
    return mask


def test_box_corners_are_inclusive() -> None:
    assert box_of(block(3, 5, 12, 7)) == (3, 5, 12, 7)
    assert box_of(block(4, 9, 4, 9)) == (4, 9, 4, 9)


def test_the_first_point_is_the_deepest_and_the_next_are_far_from_it_but_deep() -> None:
    disc_with_tail = block(2, 4, 10, 12) | block(11, 8, 28, 8)
    assert inner_points(disc_with_tail, 1) == [(6, 8)]
    bar = block(2, 4, 22, 8)
    assert inner_points(bar, 3) == [(4, 6), (21, 5), (13, 7)]
    assert sorted(inner_points(block(5, 5, 6, 5), 4)) == [(5, 5), (6, 5)], "fewer than asked for"
    assert inner_points(torch.ones(7, 11, dtype=torch.bool), 1)[0][1] == 3, "the edge of the image is outside"


def test_an_empty_mask_is_refused() -> None:
    empty = torch.zeros(20, 30, dtype=torch.bool)
    for call in (lambda: box_of(empty), lambda: inner_points(empty, 1)):
        with pytest.raises(UserError, match="one of 30 x 20 pixels"):
            call()
