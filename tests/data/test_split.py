"""The assignment of records to splits."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.data.making import data_config
from visual_grpo.common.errors import UserError
from visual_grpo.data.table import SEEN, SPLITS, SeenPrompts, group_key, prompt_key, split_of


def shares(eval_share, held_out, sealed=0.0):
    return data_config("x", eval_share=eval_share, held_out_share=held_out, sealed_share=sealed)


def test_shares_are_met():
    data = shares(0.1, 0.25, 0.2)
    splits = [split_of(f"id {number}", group_key(f"prompt {number}"), data) for number in range(4000)]
    for name, share in (("sealed", 0.2), ("held_out", 0.25), ("eval", 0.1)):
        assert splits.count(name) / 4000 == pytest.approx(share, abs=0.02)
    assert Counter(splits).total() == sum(Counter(splits)[name] for name in SPLITS)


def test_all_records_of_a_held_out_prompt_are_held_out():
    data = shares(0.3, 0.5)
    by_prompt = {
        p: {split_of(f"{p}-{number}", group_key(p), data) for number in range(20)} for p in map(str, range(40))
    }
    held_out = [splits for splits in by_prompt.values() if "held_out" in splits]
    assert 10 < len(held_out) < 30
    assert all(splits == {"held_out"} for splits in held_out)
    assert any(splits == {"train", "eval"} for splits in by_prompt.values())


def test_these_splits_never_change():
    """A new version must not move records of earlier runs from train to held_out."""
    data = shares(0.3, 0.4)
    expected = ["held_out", "held_out", "eval", "train", "eval", "train"]
    assert [split_of(str(number), group_key(f"prompt {number}"), data) for number in range(6)] == expected
    data = shares(0.1, 0.4, 0.2)
    expected = ["held_out", "held_out", "train", "train", "sealed", "sealed"]
    assert [split_of(str(number), group_key(f"prompt {number}"), data) for number in range(6)] == expected


def test_prompts_that_differ_in_case_or_spacing_only_are_the_same():
    assert prompt_key(" A  red\ncircle ") == prompt_key("a RED circle") == prompt_key("ａ red circle")
    assert prompt_key("a red circle") != prompt_key("a blue circle")
    assert group_key("a cat") == group_key(" A  Cat")


def test_an_edit_is_group_key_its_instruction_and_sources_together():
    data = shares(0, 0.5)
    keys = [group_key("make it red", source_sha256=[f"{number:064x}"]) for number in range(200)]
    assert {split_of("x", key, data) for key in keys} == {"train", "held_out"}
    assert keys[0] == group_key(" Make  it RED", source_sha256=[f"{0:064x}"])
    assert group_key("make it red", source_sha256=["a", "b"]) != group_key("make it red", source_sha256=["b", "a"])


def test_a_group_takes_the_place_of_prompt_and_sources_and_queries_have_sources_only():
    assert group_key("a", "g", ["1"]) == group_key("b", "G ", ["2"])
    assert group_key("a", "g") != group_key("a", "h")
    assert group_key("a", "a") != group_key("a")
    assert group_key(None, source_sha256=["1"]) != group_key(None, source_sha256=["2"])
    assert group_key(None, "g", ["1"]) == group_key("b", "g", ["2"])


def test_seen_prompts_are_known_again_however_they_are_spelt(tmp_path):
    with pytest.raises(UserError):
        SeenPrompts.read(tmp_path)
    (SeenPrompts.of(["a red circle"]) | SeenPrompts.of(["一个红色的圆"])).write(tmp_path)
    seen = SeenPrompts.read(tmp_path)
    assert ["A  red Circle " in seen, "一个红色的圆" in seen, "a blue circle" in seen] == [True, True, False]
    assert "red" not in (tmp_path / SEEN).read_text(), "only hashes are kept"
    for text in ("[", "3"):
        (tmp_path / SEEN).write_text(text)
        with pytest.raises(UserError, match=rf"{SEEN} is missing or damaged"):
            SeenPrompts.read(tmp_path)
