from __future__ import annotations

import pytest

from visual_grpo.grpo.optimisers import Kind, learning_rate_factor


def test_warm_up_is_linear_and_ends_at_one() -> None:
    got = [learning_rate_factor(u, 100, 4, "constant") for u in range(6)]
    assert got == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("kind", "half", "last"), [("linear", 0.5, 0.0), ("cosine", 0.5, 0.0), ("constant", 1.0, 1.0)])
def test_the_schedule_falls_from_one_after_warm_up(kind: Kind, half: float, last: float) -> None:
    assert learning_rate_factor(10, 110, 10, kind) == 1.0
    assert learning_rate_factor(60, 110, 10, kind) == pytest.approx(half)
    assert learning_rate_factor(110, 110, 10, kind) == pytest.approx(last)
    assert learning_rate_factor(35, 110, 10, "cosine") == pytest.approx(0.853553, rel=1e-5)
