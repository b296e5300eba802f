"""The drawn dataset on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from visual_grpo.starter import dataset
from visual_grpo.starter.dataset import draw_dataset


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_records_point_to_their_images(tmp_path: Path) -> None:
    draw_dataset(tmp_path / "shapes", 2, 32, 64, seed=0)
    lines = (tmp_path / "shapes" / "records.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == len({record["id"] for record in records}) == 300
    assert len({record["prompt"] for record in records}) == 150
    for record in records[::50]:
        with Image.open(tmp_path / "shapes" / record["target_image"]) as image:
            assert image.size == (64, 32)
        assert set(record["metadata"]) == {"color", "shape", "position", "size"}
        assert all(word in record["prompt"] for word in (record["metadata"]["color"], record["metadata"]["shape"]))


def test_the_seed_decides_the_files(tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        draw_dataset(tmp_path / name, 1, 32, 32, seed)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert content(tmp_path / "a") != content(tmp_path / "c")


def test_what_is_there_is_kept_and_what_is_not_is_redrawn(tmp_path: Path) -> None:
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
