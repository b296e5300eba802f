from __future__ import annotations

from visual_grpo.grpo.order import PromptOrder


def test_each_pass_holds_every_prompt_once_in_another_order() -> None:
    order = PromptOrder(7, seed=3)
    passes = [order.draw(7) for _ in range(3)]
    assert all(sorted(p) == list(range(7)) for p in passes)
    assert passes[0] != passes[1] != passes[2]


def test_the_position_is_the_whole_state() -> None:
    whole = PromptOrder(5, seed=1).draw(23)
    first = PromptOrder(5, seed=1)
    head = first.draw(8)
    assert head + PromptOrder(5, seed=1, position=first.position).draw(15) == whole


def test_seeds_differ() -> None:
    assert PromptOrder(50, seed=0).draw(50) != PromptOrder(50, seed=1).draw(50)
