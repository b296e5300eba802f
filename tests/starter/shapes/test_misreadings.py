"""The deliberate errors of the base policy."""

from __future__ import annotations

import random
from collections import Counter

from visual_grpo.starter.shapes.dataset import MISREADINGS, misread
from visual_grpo.starter.shapes.world import ATTRIBUTES, COMBINATIONS


def test_each_word_is_misread_as_often_as_planned() -> None:
    rng = random.Random(0)
    for attribute in ATTRIBUTES:
        for word, (instead, share) in MISREADINGS[attribute].items():
            asked = next(c for c in COMBINATIONS if getattr(c, attribute) == word)
            drawn = Counter(getattr(misread(asked, rng), attribute) for _ in range(2000))
            assert set(drawn) == {word, instead}
            assert abs(drawn[instead] / 2000 - share) < 0.04
