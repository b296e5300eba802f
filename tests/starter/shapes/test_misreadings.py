"""The deliberate errors of the base policy."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from visual_grpo.starter.shapes.dataset import MISREADINGS, misread, misread_edit
from visual_grpo.starter.shapes.draw import Edit, random_edit
from visual_grpo.starter.shapes.world import ATTRIBUTES, COMBINATIONS, EDITS, Combination


def test_each_word_is_misread_as_often_as_planned() -> None:
    rng = random.Random(0)
    for attribute in ATTRIBUTES:
        for word, (instead, share) in MISREADINGS[attribute].items():
            asked = next(c for c in COMBINATIONS if getattr(c, attribute) == word)
            drawn = Counter(getattr(misread(asked, rng), attribute) for _ in range(2000))
            assert set(drawn) == {word, instead}
            assert abs(drawn[instead] / 2000 - share) < 0.04


def test_other_words_are_read_right() -> None:
    clear = Combination(color="red", shape="circle", position="left", size="large")
    assert {misread(clear, random.Random(seed)) for seed in range(50)} == {clear}


def test_the_right_reading_stays_likely_enough_to_be_learned() -> None:
    rng = random.Random(1)
    right = sum(misread(asked, rng) == asked for asked in COMBINATIONS * 20) / (len(COMBINATIONS) * 20)
    assert 0.35 < right < 0.5


@pytest.mark.parametrize("kind", EDITS)
def test_the_right_edit_stays_likely_enough_to_be_learned(kind: str) -> None:
    rng = random.Random(2)
    edits = [random_edit(kind, rng.choice(COMBINATIONS), rng) for _ in range(2000)]
    drawn = [misread_edit(edit, rng) for edit in edits]
    right = sum(scene == (edit.after, edit.other) for scene, edit in zip(drawn, edits, strict=True)) / len(edits)
    assert 0.33 < right < 0.6
    if kind == "add":
        return
    copied = sum(scene == (edit.before, edit.other) for scene, edit in zip(drawn, edits, strict=True)) / len(edits)
    assert 0.3 < copied < 0.5


def drawings(edit: Edit) -> Counter[tuple[Combination | None, Combination | None]]:
    rng = random.Random(3)
    return Counter(misread_edit(edit, rng) for _ in range(3000))


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
        drawn = drawings(edit)
        assert set(drawn) == set(expected)
        for scene, share in expected.items():
            assert abs(drawn[scene] / 3000 - share) < 0.04, (edit, scene)


def test_a_misread_addition_leaves_the_other_object_its_place() -> None:
    top = Combination(color="yellow", shape="triangle", position="top", size="small")
    below = Combination(color="red", shape="circle", position="bottom", size="small")
    places = {subject.position for subject, other in drawings(Edit(kind="add", before=None, after=top)) if subject}
    assert places == {"top", "bottom"}
    beside = drawings(Edit(kind="add", before=None, after=top, other=below))
    assert {subject.position for subject, _ in beside if subject} == {"top"}
    assert {other for _, other in beside} == {below}
    assert len(beside) == 8, "colour, shape and size, each right or wrong"
