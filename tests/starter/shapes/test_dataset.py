"""The drawn dataset on disk."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from visual_grpo.common.images import read_image, to_tensor
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import Task
from visual_grpo.starter.shapes import dataset
from visual_grpo.starter.shapes.dataset import draw_dataset
from visual_grpo.starter.shapes.render import BACKGROUND, COLORS, COMBINATIONS, EDITS, draw
from visual_grpo.starter.shapes.shapes_reward import ShapesReward


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(("task", "rounds"), [("t2i", 2), ("i2i", 1)])
def test_records_point_to_their_images_and_the_reward_agrees(tmp_path: Path, task: Task, rounds: int) -> None:
    draw_dataset(tmp_path / task, rounds, 64, 96, seed=0, task=task)
    records = records_of(tmp_path / task)
    assert len(records) == len({record["id"] for record in records}) == 150 * rounds
    asked = [PromptRecord(id=r["id"], prompt=r["prompt"], metadata=r["metadata"]) for r in records]
    targets = [to_tensor(read_image(tmp_path / task / record["target_image"])) for record in records]
    assert targets[0].shape == (3, 64, 96)
    assert ShapesReward()(asked, targets).parts["all"].tolist() == [1.0] * len(records)
    if task == "i2i":
        assert Counter(record["metadata"]["edit"] for record in records) == dict.fromkeys(EDITS, 30)
        sources = [to_tensor(read_image(tmp_path / task / record["source_image"])) for record in records]
        assert ShapesReward()(asked, sources).parts["instructed"].tolist() == [0.0] * len(records)


def test_a_mixed_dataset_holds_both(tmp_path: Path) -> None:
    tasks: tuple[Task, ...] = ("t2i", "i2i", "mixed")
    digests = {draw_dataset(tmp_path / task, 1, 32, 32, seed=4, task=task) for task in tasks}
    both = records_of(tmp_path / "mixed")
    prompts, edits = records_of(tmp_path / "t2i"), records_of(tmp_path / "i2i")
    assert both == [record | {"metadata": {**record["metadata"], "edit": None}} for record in prompts] + edits
    assert len({record["id"] for record in both}) == 300
    files = content(tmp_path / "mixed")
    assert all(files[name] == data for name, data in content(tmp_path / "i2i").items() if name.endswith("png"))
    assert len(digests) == 3


def test_a_dataset_is_drawn_once_for_its_seed_and_an_interruption_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "shapes"
    first = draw_dataset(folder, 1, 32, 32, seed=5)
    before = content(folder)
    (folder / "mark").touch()
    assert draw_dataset(folder, 1, 32, 32, seed=5) == first
    assert (folder / "mark").exists()
    assert draw_dataset(folder, 1, 32, 32, seed=6) != first
    assert content(folder).keys() == before.keys()
    assert content(folder) != before
    assert draw_dataset(folder, 1, 32, 32, seed=5) == first
    assert content(folder) == before
    drawn = []

    def stopped(*arguments: object) -> Image.Image:
        drawn.append(arguments)
        if len(drawn) == 40:
            raise KeyboardInterrupt
        return Image.new("RGB", (32, 32))

    monkeypatch.setattr(dataset, "draw", stopped)
    with pytest.raises(KeyboardInterrupt):
        draw_dataset(folder, 1, 32, 32, seed=1)
    assert content(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["shapes"]


def test_shapes_are_whole_flat_and_anti_aliased() -> None:
    for combination in COMBINATIONS:
        pixels = np.asarray(draw(combination, 128, 128, random.Random(0)))
        rim = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        assert (rim == BACKGROUND).all(), combination
        flat = (pixels == BACKGROUND).all(-1) | (pixels == COLORS[combination.color]).all(-1)
        assert 0.95 < flat.mean() < 1, combination
