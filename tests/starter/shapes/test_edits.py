"""Edits of drawn shapes: their instructions, their changes, and that everything else stays the same."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest

from visual_grpo.starter.shapes.dataset import MISREADINGS, misread
from visual_grpo.starter.shapes.render import (
    ATTRIBUTES,
    COMBINATIONS,
    EDITS,
    OPPOSITE,
    Combination,
    Edit,
    instructions,
    random_edit,
)


def some(kind: str, count: int = 300) -> Iterator[Edit]:
    rng = random.Random(0)
    return (random_edit(kind, rng.choice(COMBINATIONS), rng) for _ in range(count))


@pytest.mark.parametrize("kind", ["add", "remove"])
def test_an_object_comes_or_goes_beside_one_at_the_opposite_place(kind: str) -> None:
    beside = 0
    for edit in some(kind):
        assert (edit.before is None, edit.after is None) == (kind == "add", kind == "remove")
        assert edit.subject.shape in edit.instruction
        if edit.other is not None:
            beside += 1
            assert edit.other.position == OPPOSITE[edit.subject.position]
            assert kind == "add" or edit.other.shape != edit.subject.shape, "it must be clear which one"
    assert 80 < beside < 160


def test_the_tokenizer_is_trained_on_every_instruction() -> None:
    texts = instructions()
    assert len(texts) == len(set(texts)) == 5 + 5 + 2 + 150 + 3
    assert {edit.instruction for kind in EDITS for edit in some(kind)} <= set(texts)


def test_a_group_is_a_source_in_words_and_an_instruction() -> None:
    circle = Combination(color="red", shape="circle", position="left", size="small")
    square = Combination(color="blue", shape="square", position="right", size="large")
    beside = Edit(kind="remove", before=circle, after=None, other=square)
    shown = "a small red circle on the left and a large blue square on the right"
    assert beside.group == f"{shown}: remove the circle"
    assert Edit(kind="add", before=None, after=circle).group == "nothing: add a small red circle on the left"
    words: dict[str, set[Edit]] = defaultdict(set)
    for kind in EDITS:
        for edit in some(kind):
            words[edit.group].add(edit)
    assert all(len(own) == 1 for own in words.values())


def test_each_word_is_misread_as_often_as_planned() -> None:
    rng = random.Random(0)
    for attribute in ATTRIBUTES:
        for word, (instead, share) in MISREADINGS[attribute].items():
            asked = next(c for c in COMBINATIONS if getattr(c, attribute) == word)
            drawn = Counter(getattr(misread(asked, rng), attribute) for _ in range(2000))
            assert set(drawn) == {word, instead}
            assert abs(drawn[instead] / 2000 - share) < 0.04
