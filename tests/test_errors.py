"""The hint at the name that a misspelt one probably stands for."""

from __future__ import annotations

import pytest

from visual_grpo.errors import nearest_hint


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


def test_a_higher_cutoff_suggests_less() -> None:
    assert nearest_hint("kind", ["mind"]) == " Did you mean 'mind'?"
    assert nearest_hint("kind", ["mind"], cutoff=0.8) == ""


def test_without_candidates_there_is_no_hint() -> None:
    assert nearest_hint("kind", iter(())) == ""
