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
from visual_grpo.starter.shapes.draw import BACKGROUND, COLORS, COMBINATIONS, EDITS, draw
from visual_grpo.starter.shapes.reward import ShapesReward

TASKS: tuple[Task, ...] = ("t2i", "i2i", "mixed")


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_records_point_to_their_images(tmp_path: Path) -> None:
    draw_dataset(tmp_path / "shapes", 2, 32, 64, seed=0)
    records = records_of(tmp_path / "shapes")
    assert len(records) == len({record["id"] for record in records}) == 300
    assert len({record["prompt"] for record in records}) == 150
    for record in records[::50]:
        with Image.open(tmp_path / "shapes" / record["target_image"]) as image:
            assert image.size == (64, 32)
        assert set(record["metadata"]) == {"color", "shape", "position", "size"}
        assert all(word in record["prompt"] for word in (record["metadata"]["color"], record["metadata"]["shape"]))


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text(encoding="utf-8").splitlines()]


def test_edits_point_to_their_sources_and_targets_and_the_reward_agrees(tmp_path: Path) -> None:
    draw_dataset(tmp_path / "edits", 1, 64, 96, seed=0, task="i2i")
    records = records_of(tmp_path / "edits")
    assert Counter(record["metadata"]["edit"] for record in records) == dict.fromkeys(EDITS, 30)
    asked = [PromptRecord(id=r["id"], prompt=r["prompt"], metadata=r["metadata"]) for r in records]
    sources, targets = (
        [to_tensor(read_image(tmp_path / "edits" / record[key])) for record in records]
        for key in ("source_image", "target_image")
    )
    assert sources[0].shape == (3, 64, 96)
    assert ShapesReward()(asked, targets).parts["all"].tolist() == [1.0] * len(records)
    assert ShapesReward()(asked, sources).parts["instructed"].tolist() == [0.0] * len(records)


def test_a_mixed_dataset_holds_both(tmp_path: Path) -> None:
    digests = {draw_dataset(tmp_path / task, 1, 32, 32, seed=4, task=task) for task in TASKS}
    both = records_of(tmp_path / "mixed")
    prompts, edits = records_of(tmp_path / "t2i"), records_of(tmp_path / "i2i")
    assert both == [record | {"metadata": {**record["metadata"], "edit": None}} for record in prompts] + edits
    assert len({record["id"] for record in both}) == 300
    files = content(tmp_path / "mixed")
    assert all(files[name] == data for name, data in content(tmp_path / "i2i").items() if name.endswith("png"))
    assert len(digests) == 3


def test_the_seed_decides_the_files(tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        draw_dataset(tmp_path / name, 1, 32, 32, seed)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert content(tmp_path / "a") != content(tmp_path / "c")


def test_a_current_dataset_is_kept_and_another_is_redrawn(tmp_path: Path) -> None:
    folder = tmp_path / "shapes"
    first = draw_dataset(folder, 1, 32, 32, seed=0)
    (folder / "mark").touch()
    assert draw_dataset(folder, 1, 32, 32, seed=0) == first
    assert (folder / "mark").exists()
    assert draw_dataset(folder, 1, 32, 64, seed=0) != first
    assert not (folder / "mark").exists()


def test_an_interrupted_drawing_leaves_the_old_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "shapes"
    draw_dataset(folder, 1, 32, 32, seed=0)
    before = content(folder)
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
