"""The prompts that a training has seen, kept beside its adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from visual_grpo.errors import UserError
from visual_grpo.records.seen import FILE, SeenPrompts


def test_what_was_seen_is_known_again_however_it_is_spelt(tmp_path: Path) -> None:
    SeenPrompts.of(["a red circle", "一个红色的圆"]).write(tmp_path)
    seen = SeenPrompts.read(tmp_path)
    assert seen is not None
    assert "A  red Circle " in seen
    assert "一个红色的圆" in seen
    assert "a blue circle" not in seen
    assert "red" not in (tmp_path / FILE).read_text(), "only hashes are kept"


def test_a_chain_of_trainings_has_seen_all_of_their_prompts() -> None:
    both = SeenPrompts.of(["a"]) | SeenPrompts.of(["b"])
    assert ["a" in both, "b" in both, "c" in both] == [True, True, False]


def test_an_older_training_says_nothing_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    assert SeenPrompts.read(tmp_path) is None
    for text in ("[", "3"):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(UserError, match=rf"{FILE} is damaged"):
            SeenPrompts.read(tmp_path)
