"""The labels pipeline on drawn squares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from kedro.io import DataCatalog, MemoryDataset
from PIL import Image
from torch import Tensor

from tests.evaluation.defaults import FILE, parameters
from tests.evaluation.test_pictures import where
from tests.pipelines.painted import folders, run_nodes
from tests.rewards.segmentation.small_sam2 import save_sam2
from visual_grpo.common.errors import UserError
from visual_grpo.common.images import read_image
from visual_grpo.config import Parameters
from visual_grpo.data.datasets import RecordsDataset
from visual_grpo.data.manifest import RecordTable, write_manifest
from visual_grpo.evaluation.pictures import BETTER, GAP, WIDTH, WORSE
from visual_grpo.hooks.parameters import parameter_entries
from visual_grpo.pipeline_registry import register_pipelines
from visual_grpo.pipelines.labels import COUNT, SHOWN, label
from visual_grpo.rewards.segmentation import PointPrompt
from visual_grpo.rewards.segmentation.watershed import Linkage, WatershedSegmenter

ENVIRONMENT = yaml.safe_load((FILE.parents[1] / "negative_points" / "parameters.yml").read_text(encoding="utf-8"))
SIZE = (64, 96)


def write_records(folder: Path, count: int) -> Path:
    """Squares, and one that is sealed."""
    pixels = np.zeros(SIZE, dtype=np.uint8)
    pixels[20:40, 30:50] = 255
    Image.fromarray(pixels).save(folder / "mask.png")
    Image.fromarray(pixels // 2).convert("RGB").save(folder / "image.png")
    row = {
        "prompt": "the square",
        "target_image": "mask.png",
        "source_images": ["image.png"],
        "metadata": json.dumps({"box": [30, 20, 49, 39], "points": [[40, 30]]}),
    }
    rows = [row | {"id": f"{number:02d}", "split": "train" if number else "sealed"} for number in range(count + 1)]
    write_manifest(folder / "records.parquet", rows)
    return folder / "records.parquet"


def run(folder: Path, tree: dict[str, Any], count: int = 1) -> tuple[Path, list[dict[str, Any]]]:
    """The labels' folder, and its lines."""
    records = RecordsDataset(filepath=str(write_records(folder, count)))
    typed = {name: MemoryDataset(value) for name, value in parameter_entries(Parameters.model_validate(tree)).items()}
    catalog = DataCatalog(typed | {"records": records} | folders(folder, {"negative_labels": "labels"}))
    run_nodes(register_pipelines()["labels"], catalog)
    labels = folder / "negative_labels"
    return labels, [json.loads(line) for line in (labels / "labels.jsonl").read_text().splitlines()]


def test_each_record_has_labels_of_each_kind_and_some_are_drawn(tmp_path: Path) -> None:
    tree = parameters(**ENVIRONMENT).model_dump(mode="json")
    folder, lines = run(tmp_path, tree, count=2 * SHOWN)
    assert [line["kind"] for line in lines] == ["ring", "edge"] * 2 * SHOWN
    assert all(len(line["points"]) == COUNT for line in lines)
    assert not any(30 <= x < 50 and 20 <= y < 40 for line in lines for x, y in line["points"])
    picture = read_image(folder / "labels.png")
    assert picture.width == 3 * WIDTH + 4 * GAP
    columns = [picture.crop((GAP + k * (WIDTH + GAP), 0, (k + 1) * (WIDTH + GAP), picture.height)) for k in range(3)]
    for colour, shown in ((BETTER, [True, False, False]), (WORSE, [False, True, True])):
        assert [bool(where(column, colour).any()) for column in columns] == shown
    middle = round(40.5 * WIDTH / SIZE[1])
    marked = where(columns[0], BETTER)[:, middle - 1 : middle + 2].all(1).astype(int)
    edges = np.flatnonzero(np.diff(marked)).reshape(-1, 3, 2).mean(2)
    assert len(edges) == SHOWN, "the box's upper side, the point and the lower side of each"
    upper, point, lower = edges.T
    assert (point - upper) / (lower - upper) == pytest.approx((30.5 - 20) / (40 - 20), abs=0.02)


def test_the_segmenter_is_the_rewards(tmp_path: Path) -> None:
    tree = parameters(**ENVIRONMENT).model_dump(mode="json")
    sam2 = {"kind": "sam2", "path": str(save_sam2(tmp_path / "sam2")), "device": "cpu"}
    tree["rewards"]["negative_points"]["options"] = {"segmenter": sam2}
    _, lines = run(tmp_path, tree)
    assert [line["kind"] for line in lines] == ["ring", "edge", "multimask"]


class Doubtful(WatershedSegmenter):
    """Returns an alternative mask for every prompt: the upper left corner."""

    def multimasks(self, embedding: Linkage, prompt: PointPrompt) -> tuple[Tensor, Tensor]:
        corner = torch.zeros(1, *embedding.size, dtype=torch.bool)
        corner[:, :8, :8] = True
        return torch.cat([self.masks(embedding, [prompt]), corner]), torch.tensor([0.9, 0.5])


def test_labels_depend_on_the_record_and_the_seed_alone(tmp_path: Path) -> None:
    first, second = RecordTable(write_records(tmp_path, 2)).split("train")
    found = label(first, Doubtful(), 0).labels
    assert max(max(point) for point in found["multimask"]) < 8
    assert found == label(first, Doubtful(), 0).labels
    assert found != label(first, Doubtful(), 1).labels
    assert found != label(second, Doubtful(), 0).labels


def test_records_without_masks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.task must be segmentation, got t2i"):
        run(tmp_path, parameters().model_dump(mode="json"))
