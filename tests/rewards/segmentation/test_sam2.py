from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.rewards.segmentation.small_sam2 import SIDE, save_sam2, save_sam3
from visual_grpo.common.errors import UserError
from visual_grpo.rewards.negative_points import NegativePointsReward
from visual_grpo.rewards.segmentation import PointPrompt, build_segmenter
from visual_grpo.rewards.segmentation.sam2 import Sam2Embedding, Sam2Segmenter

HEIGHT, WIDTH = 48, 80
POINTS = PointPrompt(positives=((10, 20), (60.5, 7)), negatives=((33, 41),))
BOXED = PointPrompt(positives=((30, 20),), box=(12, 5, 70, 40))
BARE = PointPrompt(positives=POINTS.positives)
PROMPTS = [POINTS, BOXED, BARE, PointPrompt(positives=((3, 3),), negatives=((70, 30),) * 3)]


@pytest.fixture(scope="module", params=["sam2", "sam3"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return {"sam2": save_sam2, "sam3": save_sam3}[kind](tmp_path_factory.mktemp(kind))


@pytest.fixture(scope="module")
def segmenter(kind: str, folder: Path) -> Sam2Segmenter:
    segmenter = build_segmenter({"kind": kind, "path": str(folder), "device": "cpu"})
    assert isinstance(segmenter, Sam2Segmenter)
    return segmenter


@pytest.fixture(scope="module")
def image() -> Tensor:
    blocks = torch.randint(256, (3, HEIGHT // 8, WIDTH // 8), generator=torch.Generator().manual_seed(0))
    return blocks.repeat_interleave(8, 1).repeat_interleave(8, 2).to(torch.uint8)


@pytest.fixture(scope="module")
def embedding(segmenter: Sam2Segmenter, image: Tensor) -> Sam2Embedding:
    return segmenter.embed(image)


def stock_logits(segmenter: Sam2Segmenter, image: Tensor, prompt: PointPrompt, multimask: bool = False) -> Tensor:
    """float32 [1 or 3, h, w]: logits of the plain model and Sam2Processor, with boxes passed as boxes."""
    points = [list(point) for point in (*prompt.positives, *prompt.negatives)]
    labels = [1] * len(prompt.positives) + [0] * len(prompt.negatives)
    inputs = segmenter.processor(
        images=image,
        input_points=[[points]],
        input_labels=[[labels]],
        input_boxes=None if prompt.box is None else [[list(prompt.box)]],
        return_tensors="pt",
    )
    del inputs["original_sizes"]
    with torch.inference_mode():
        return segmenter.model(**inputs, multimask_output=multimask).pred_masks[0, 0]


def test_masks_equal_those_of_the_processor(segmenter: Sam2Segmenter, image: Tensor, embedding: Sam2Embedding) -> None:
    masks = segmenter.masks(embedding, PROMPTS)
    stock = torch.stack([stock_logits(segmenter, image, prompt) for prompt in PROMPTS])
    [expected] = segmenter.processor.post_process_masks([stock], [(HEIGHT, WIDTH)])
    assert torch.equal(masks, expected[:, 0])
    assert (masks.shape, masks.dtype) == ((4, HEIGHT, WIDTH), torch.bool)
    assert len({mask.numpy().tobytes() for mask in masks}) == 4, "the prompts must give different masks"


def test_a_mask_depends_on_its_prompt_alone(
    segmenter: Sam2Segmenter, embedding: Sam2Embedding, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = PROMPTS * 3
    together = segmenter.masks(embedding, many)
    alone = torch.cat([segmenter.masks(embedding, [prompt]) for prompt in many])
    assert torch.equal(together, alone)
    monkeypatch.setattr("visual_grpo.rewards.segmentation.sam2._BATCH", 2)
    assert torch.equal(together, segmenter.masks(embedding, many))


def test_three_masks_with_scores(segmenter: Sam2Segmenter, image: Tensor, embedding: Sam2Embedding) -> None:
    masks, scores = segmenter.multimasks(embedding, BOXED)
    stock = stock_logits(segmenter, image, BOXED, multimask=True)
    [expected] = segmenter.processor.post_process_masks([stock[None]], [(HEIGHT, WIDTH)])
    assert torch.equal(masks, expected[0])
    assert scores.shape == (3,)
    assert ((scores > 0) & (scores < 1)).all()


def test_folders_without_a_model_are_refused_before_any_work(kind: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"this folder lacks config.json, model.safetensors"):
        NegativePointsReward(segmenter={"kind": kind, "path": str(tmp_path)}).check_machine()
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be loaded"):
        build_segmenter({"kind": kind, "path": str(tmp_path)}).embed(torch.zeros(3, SIDE, SIDE, dtype=torch.uint8))


def test_a_device_that_is_none_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="is 'gpu'; expected auto, cpu"):
        Sam2Segmenter(str(folder), device="gpu").check_machine()
