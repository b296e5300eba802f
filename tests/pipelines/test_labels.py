from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from kedro.io import DataCatalog, MemoryDataset
from kedro.runner import SequentialRunner
from PIL import Image

from tests.evaluation.defaults import FILE, parameters
from tests.pipelines.painted import folders
from tests.segmentation.small_sam2 import save_sam2
from visual_grpo.config import Parameters
from visual_grpo.datasets import RecordsDataset
from visual_grpo.datasets.parameters import parameter_entries
from visual_grpo.errors import UserError
from visual_grpo.pipeline_registry import create_pipeline

ENVIRONMENT = yaml.safe_load((FILE.parents[1] / "negative_points" / "parameters.yml").read_text(encoding="utf-8"))


def run(folder: Path, tree: dict[str, Any]) -> Path:
    """Runs the pipeline on one record, and one that is sealed; returns the labels' folder."""
    pixels = np.zeros((64, 64), dtype=np.uint8)
    pixels[20:40, 30:50] = 255
    for name in ("image", "mask"):
        Image.fromarray(pixels).save(folder / f"{name}.png")
    row = {
        "id": "a",
        "prompt": "the square",
        "split": "train",
        "target_image": "mask.png",
        "source_images": ["image.png"],
        "metadata": json.dumps({"box": [30, 20, 49, 39], "points": [[40, 30]]}),
    }
    sealed = row | {"id": "b", "split": "sealed"}
    RecordsDataset(filepath=str(folder / "records.parquet")).save([row, sealed])
    typed = parameter_entries(Parameters.model_validate(tree))
    catalog = DataCatalog(
        {name: MemoryDataset(value) for name, value in typed.items()}
        | {"records": RecordsDataset(filepath=str(folder / "records.parquet"))}
        | folders(folder, {"negative_labels": "labels"})
    )
    SequentialRunner().run(create_pipeline("labels"), catalog)
    return folder / "negative_labels"


def kinds(labels: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in (labels / "labels.jsonl").read_text().splitlines()]


def test_the_segmenter_is_the_rewards(tmp_path: Path) -> None:
    tree = parameters(**ENVIRONMENT).model_dump(mode="json")
    labels = run(tmp_path, tree)
    assert kinds(labels) == ["ring", "edge"]
    assert (labels / "labels.png").is_file()
    sam2 = {"kind": "sam2", "path": str(save_sam2(tmp_path / "sam2")), "device": "cpu"}
    tree["rewards"]["negative_points"]["options"] = {"segmenter": sam2}
    assert kinds(run(tmp_path, tree)) == ["ring", "edge", "multimask"]


def test_records_without_masks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.task must be segmentation, got t2i"):
        run(tmp_path, parameters().model_dump(mode="json"))
