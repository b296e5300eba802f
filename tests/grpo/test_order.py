from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from visual_grpo.common.types import PromptRecord
from visual_grpo.grpo.sampling import PromptOrder


def of_kinds(kinds: list[int]) -> list[PromptRecord]:
    """Prompts with so many source images each."""
    return [PromptRecord(id=str(i), prompt="", source_images=(Path("x"),) * kind) for i, kind in enumerate(kinds)]


def test_each_pass_holds_every_prompt_once_in_another_order() -> None:
    order = PromptOrder(of_kinds([0] * 7), seed=3)
    passes = [order.take(7) for _ in range(3)]
    assert all(sorted(p) == list(range(7)) for p in passes)
    assert passes[0] != passes[1] != passes[2]
    others = [PromptOrder(of_kinds([0] * 7), seed=3 + turns * 256).take(7) for turns in (1, 2)]
    assert passes[0] != others[0] != others[1] != passes[0], "torch's generators read 32 bits of a seed"


def test_the_positions_are_the_whole_state() -> None:
    kinds = [0, 1, 0, 1, 1, 0, 0]
    whole = [PromptOrder(of_kinds(kinds), seed=1)]
    drawn = [whole[0].take(3) for _ in range(9)]
    first = PromptOrder(of_kinds(kinds), seed=1)
    head = [first.take(3) for _ in range(4)]
    rest = PromptOrder(of_kinds(kinds), seed=1, positions=first.positions)
    assert head + [rest.take(3) for _ in range(5)] == drawn


def test_a_draw_holds_one_kind_and_all_are_seen_equally_often() -> None:
    kinds = [0] * 6 + [2] * 2
    order = PromptOrder(of_kinds(kinds), seed=4)
    draws = [order.take(2) for _ in range(8)]
    assert all(len({kinds[i] for i in draw}) == 1 for draw in draws)
    assert sorted(i for draw in draws for i in draw) == sorted([*range(8)] * 2)


@pytest.mark.parametrize(("prompts", "count"), [(2, 5), (3, 2), (3, 3), (3, 8), (4, 3), (5, 4), (9, 8)])
def test_no_prompt_follows_itself_in_a_draw(prompts: int, count: int) -> None:
    for seed in range(20):
        order = PromptOrder(of_kinds([0] * prompts), seed=seed)
        draws = [order.take(count) for _ in range(3 * prompts)]
        assert not any(one == other for draw in draws for one, other in pairwise(draw))
        assert sorted(i for draw in draws for i in draw) == sorted([*range(prompts)] * 3 * count)
