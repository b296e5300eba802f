from __future__ import annotations

import pytest
import torch

from visual_grpo.rewards.point_terms import box_term, number, placement, points_term, spaced

CONFUSED, TRUTH, NOTHING = (torch.zeros(10, 10, dtype=torch.bool) for _ in range(3))
CONFUSED[:, 6:] = True
TRUTH[:, :4] = True


@pytest.mark.parametrize(
    ("negatives", "expected"),
    [
        ([(8, 5)], 1),
        ([(2, 5)], -1),
        ([(5, 5)], 0),
        ([(8, 5), (2, 5)], 0),
        ([(8, 5), (9, 1), (5, 5), (2, 0)], 0.25),
        ([], 0),
        ([(20, 5)], 1),  # beyond the image counts as its edge
    ],
)
def test_placement(negatives: list[tuple[float, float]], expected: float) -> None:
    assert placement(negatives, CONFUSED, TRUTH) == expected


def test_without_confusion_no_negative_points_score_best() -> None:
    assert placement([], NOTHING, TRUTH) == 1
    assert placement([(5, 5)], NOTHING, TRUTH) == 0
    assert placement([(2, 5)], NOTHING, TRUTH) == -1


def test_negatives_are_spaced_and_capped() -> None:
    points = [(0.0, 0.0), (3.0, 0.0), (5.0, 0.0), (9.0, 0.0), (5.0, 5.0)]
    assert spaced(points, 9, 4.0) == ((0.0, 0.0), (5.0, 0.0), (9.0, 0.0), (5.0, 5.0))
    assert spaced(points, 2, 4.0) == ((0.0, 0.0), (5.0, 0.0))
    assert number(points, spaced(points, 2, 4.0)) == -0.6
    assert number([], ()) == 0 == number(points, points)


def test_the_box_term_has_two_halves() -> None:
    truth, size = (100.0, 100.0, 299.0, 299.0), (840, 840)
    assert box_term(truth, truth, size) == 1
    assert box_term((109.0, 109.0, 308.0, 308.0), truth, size) == 1  # 9 pixels of 840 in each coordinate
    assert box_term((111.0, 111.0, 310.0, 310.0), truth, size) == 0.5  # 11: only the overlap is good
    assert box_term((100.0, 100.0, 199.0, 299.0), truth, size) == 0  # exactly half of it is not above a half
    assert box_term((100.0, 100.0, 200.0, 299.0), truth, size) == 0.5
    assert box_term((118.0, 100.0, 317.0, 299.0), truth, (840, 1680)) == 1  # distances are shares of a side


def test_points_are_in_the_box_and_near() -> None:
    box, size = (0.0, 0.0, 400.0, 400.0), (840, 840)
    assert points_term([(90, 0), (0, 99)], [(0, 0)], box, size) == 1
    assert points_term([(101, 0)], [(0, 0)], box, size) == 0
    assert points_term([(150, 0), (0, 0)], [(0, 0)], box, size) == 1  # on average
    assert points_term([(150, 0), (0, 0)], [(0, 0), (140, 0)], box, size) == 1
    assert points_term([(10, 10), (0, 401)], [(0, 0), (0, 401)], box, size) == 0
