"""Which preset fits the records."""

from __future__ import annotations

from pathlib import Path

import pytest

from visual_grpo.config import Task
from visual_grpo.config.presets import PresetName
from visual_grpo.preflight.reward import Traits
from visual_grpo.types import PromptRecord

IMAGE = Path("a.png")
PLAIN = PromptRecord(id="plain", prompt="a cat")
QUOTED = PromptRecord(id="quoted", prompt='a sign that says "OPEN"')
TEXT = PromptRecord(id="text", prompt="a sign", metadata={"text": "OPEN"})
TARGET = PromptRecord(id="target", prompt="a cat", target_image=IMAGE)
EDIT = PromptRecord(id="edit", prompt="make it red", target_image=IMAGE, source_images=(IMAGE,))
QUOTED_TARGET = PromptRecord(id="both", prompt='"OPEN"', target_image=IMAGE)


def traits(*records: PromptRecord, task: Task = "t2i") -> Traits:
    found = Traits(task)
    for record in records:
        found.add(record)
    return found


@pytest.mark.parametrize(
    ("records", "preset"),
    [
        ([PLAIN], None),
        ([TARGET, TARGET], "target"),
        ([TARGET, EDIT], "edit"),
        ([TARGET, PLAIN], None),
        ([QUOTED, TEXT], "text"),
        ([QUOTED, PLAIN], None),
        ([QUOTED, QUOTED_TARGET], "text"),
        ([QUOTED_TARGET], "target"),
        ([], None),
    ],
)
def test_a_preset_can_judge_every_record(records: list[PromptRecord], preset: PresetName | None) -> None:
    assert traits(*records).preset() == preset


def test_masks_are_for_negative_points() -> None:
    assert traits(EDIT, task="segmentation").preset() == "negative_points"


def test_those_that_lack_something_are_counted_and_some_named() -> None:
    found = traits(TARGET, *[PLAIN] * 4)
    assert str(found.no_target) == "4 ('plain', 'plain', 'plain', ...)"
    assert str(found.no_text) == "5 ('target', 'plain', 'plain', ...)"
