"""The deliberate errors of the base policy."""

from __future__ import annotations

import random
from collections import Counter

from visual_grpo.starter.shapes.dataset import MISREADINGS, misread, misread_edit
from visual_grpo.starter.shapes.draw import Edit
from visual_grpo.starter.shapes.world import ATTRIBUTES, COMBINATIONS, Combination


def test_each_word_is_misread_as_often_as_planned() -> None:
    rng = random.Random(0)
    for attribute in ATTRIBUTES:
        for word, (instead, share) in MISREADINGS[attribute].items():
            asked = next(c for c in COMBINATIONS if getattr(c, attribute) == word)
            drawn = Counter(getattr(misread(asked, rng), attribute) for _ in range(2000))
            assert set(drawn) == {word, instead}
            assert abs(drawn[instead] / 2000 - share) < 0.04


def test_misread_edits() -> None:
    small = Combination(color="red", shape="circle", position="left", size="small")
    large = Combination(color="red", shape="circle", position="left", size="large")
    moved = Combination(color="red", shape="circle", position="right", size="small")
    grown = Combination(color="red", shape="circle", position="right", size="large")
    centered = Combination(color="red", shape="circle", position="center", size="large")
    other = Combination(color="blue", shape="square", position="right", size="small")
    cases: list[tuple[Edit, dict[tuple[Combination | None, Combination | None], float]]] = [
        (Edit(kind="move", before=small, after=moved), {(small, None): 0.33, (moved, None): 0.4, (grown, None): 0.27}),
        (
            Edit(kind="resize", before=small, after=large),
            {(small, None): 0.33, (large, None): 0.37, (centered, None): 0.3},
        ),
        (
            Edit(kind="remove", before=small, after=None, other=other),
            {(small, other): 0.45, (None, other): 0.385, (small, None): 0.165},
        ),
        (Edit(kind="remove", before=small, after=None), {(small, None): 0.45, (None, None): 0.55}),
    ]
    for edit, expected in cases:
        rng = random.Random(3)
        drawn = Counter(misread_edit(edit, rng) for _ in range(3000))
        assert set(drawn) == set(expected)
        for scene, share in expected.items():
            assert abs(drawn[scene] / 3000 - share) < 0.04, (edit, scene)
