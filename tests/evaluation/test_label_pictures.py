from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from visual_grpo.evaluation.label_pictures import COUNT, SHOWN, label, write_labels
from visual_grpo.evaluation.pictures import BETTER, GAP, WIDTH, WORSE
from visual_grpo.segmentation.segmenter import PointPrompt
from visual_grpo.segmentation.watershed import Linkage, WatershedSegmenter
from visual_grpo.types import PromptRecord

HEIGHT, WIDTH_PX = 64, 96


class Doubtful(WatershedSegmenter):
    """Returns an alternative mask for every prompt: the upper left corner."""

    def multimasks(self, embedding: Linkage, prompt: PointPrompt) -> tuple[Tensor, Tensor]:
        corner = torch.zeros(1, *embedding.size, dtype=torch.bool)
        corner[:, :8, :8] = True
        return torch.cat([self.masks(embedding, [prompt]), corner]), torch.tensor([0.9, 0.5])


def make_record(folder: Path, name: str) -> PromptRecord:
    """A grey square on black."""
    pixels = np.zeros((HEIGHT, WIDTH_PX), dtype=np.uint8)
    pixels[20:40, 30:50] = 255
    Image.fromarray(pixels).save(folder / f"{name}-mask.png")
    Image.fromarray(pixels // 2).convert("RGB").save(folder / f"{name}.png")
    return PromptRecord(
        id=name,
        prompt=f"square {name}",
        source_images=(folder / f"{name}.png",),
        target_image=folder / f"{name}-mask.png",
        metadata={"box": [30, 20, 49, 39], "points": [[40, 30]]},
    )


def written(records: list[PromptRecord], folder: Path, segmenter: WatershedSegmenter) -> tuple[list[dict], int]:
    folder.mkdir()
    done: list[int] = []
    write_labels(folder, records, segmenter, 0, lambda: done.append(1))
    return [json.loads(line) for line in (folder / "labels.jsonl").read_text().splitlines()], len(done)


def test_a_line_for_each_record_and_kind(tmp_path: Path) -> None:
    records = [make_record(tmp_path, name) for name in ("a", "b")]
    lines, done = written(records, tmp_path / "labels", Doubtful())
    kinds = ("ring", "edge", "multimask")
    assert [(line["id"], line["kind"]) for line in lines] == [(name, kind) for name in "ab" for kind in kinds]
    assert all(len(line["points"]) == COUNT for line in lines)
    for line in lines:
        for x, y in line["points"]:
            assert not (30 <= x < 50 and 20 <= y < 40)
            assert line["kind"] != "multimask" or max(x, y) < 8
    assert done == 2


def test_a_segmenter_with_one_mask_gives_no_multimask_labels(tmp_path: Path) -> None:
    lines, _ = written([make_record(tmp_path, "a")], tmp_path / "labels", WatershedSegmenter())
    assert [line["kind"] for line in lines] == ["ring", "edge"]


def test_labels_do_not_depend_on_other_records(tmp_path: Path) -> None:
    records = [make_record(tmp_path, name) for name in ("a", "b")]
    both, _ = written(records, tmp_path / "both", Doubtful())
    second, _ = written(records[1:], tmp_path / "second", Doubtful())
    assert both[3:] == second
    assert [line["points"] for line in both[:3]] != [line["points"] for line in both[3:]]
    assert label(records[0], Doubtful(), 1).labels != label(records[0], Doubtful(), 0).labels


def test_the_picture_has_a_row_per_shown_record_and_a_column_per_kind(tmp_path: Path) -> None:
    records = [make_record(tmp_path, f"{number}") for number in range(2 * SHOWN)]
    written(records, tmp_path / "labels", WatershedSegmenter())
    picture = np.asarray(Image.open(tmp_path / "labels" / "labels.png").convert("RGB"))
    assert picture.shape[1] == 3 * WIDTH + 4 * GAP
    columns = [picture[:, GAP + k * (WIDTH + GAP) :][:, :WIDTH] for k in range(3)]
    for colour, shown in ((BETTER, [True, False, False]), (WORSE, [False, True, True])):
        wanted = np.asarray(Image.new("RGB", (1, 1), colour))[0, 0]
        assert [bool((column == wanted).all(-1).any()) for column in columns] == shown
    centres = (columns[0] == np.asarray(Image.new("RGB", (1, 1), BETTER))[0, 0]).all(-1)
    middle = round(40.5 * WIDTH / WIDTH_PX)
    filled = np.flatnonzero(np.diff(centres[:, middle - 1 : middle + 2].all(1).astype(int)) == 1)
    assert len(filled) == SHOWN * 3, "the box's upper side, the point and the lower side of each record"
