"""The hint at the name that a misspelt one probably stands for, and several problems in one message."""

from __future__ import annotations

import pytest

from visual_grpo.errors import CombinedError, Problems, UserError, counted, nearest_hint


def test_one_is_singular() -> None:
    found = [counted(number, what) for number in (0, 1, 2) for what in ("picture", "entry")]
    assert found == ["0 pictures", "0 entries", "1 picture", "1 entry", "2 pictures", "2 entries"]


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("grpo.step", " Did you mean 'grpo.steps'?"),
        ("grpo.seeds", " Did you mean 'grpo.seed'?"),
        ("weight", ""),
    ],
)
def test_the_closest_name_is_suggested(wrong: str, hint: str) -> None:
    assert nearest_hint(wrong, ["grpo.seed", "grpo.steps"]) == hint


def test_problems_are_told_together_and_not_nested():
    problems = Problems()
    for error in (UserError("one"), CombinedError(["two", "three"]), UserError("one")):
        with problems.collect():
            raise error
    with pytest.raises(UserError) as refused:
        problems.raise_if_any("Run: this")
    assert str(refused.value) == "3 things are wrong:\n1. one\n2. two\n3. three\nRun: this"
    assert str(CombinedError(["alone"])) == "alone"
    Problems().raise_if_any("nothing is wrong")
