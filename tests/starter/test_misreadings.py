"""The base policy's planted errors."""

from __future__ import annotations

import random
from collections import Counter

from visual_grpo.shapes_world import ATTRIBUTES, COMBINATIONS, Combination
from visual_grpo.starter.misreadings import MISREADINGS, misread


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
