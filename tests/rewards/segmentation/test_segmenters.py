"""The segmenters: SAM 2 and SAM 3 against transformers' own masks, the watershed against a slow one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.rewards.segmentation.small_sam2 import SIDE, save_sam2, save_sam3
from visual_grpo.common.errors import UserError
from visual_grpo.common.geometry import Point
from visual_grpo.rewards.negative_points import NegativePointsReward
from visual_grpo.rewards.segmentation import PointPrompt, build_segmenter
from visual_grpo.rewards.segmentation.sam2 import Sam2Embedding, Sam2Segmenter
from visual_grpo.rewards.segmentation.watershed import WatershedSegmenter

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


def minimax(image: Tensor, x: int, y: int) -> Tensor:
    """int64 [H, W]: smallest maximum squared colour edge on a path to pixel (x, y), by relaxation to a fixed point."""
    colours = image.long()
    beside = (colours[:, :, 1:] - colours[:, :, :-1]).square().sum(0)
    below = (colours[:, 1:] - colours[:, :-1]).square().sum(0)
    least = torch.full(image.shape[1:], 10**9)
    least[y, x] = 0
    while True:
        before = least.clone()
        least[:, 1:] = torch.minimum(least[:, 1:], torch.maximum(before[:, :-1], beside))
        least[:, :-1] = torch.minimum(least[:, :-1], torch.maximum(before[:, 1:], beside))
        least[1:] = torch.minimum(least[1:], torch.maximum(before[:-1], below))
        least[:-1] = torch.minimum(least[:-1], torch.maximum(before[1:], below))
        if torch.equal(before, least):
            return least


def slow_mask(image: Tensor, prompt: PointPrompt, edge: float) -> Tensor:
    def nearest(points: tuple[Point, ...]) -> Tensor:
        far = torch.full(image.shape[1:], 10**9)
        return torch.stack([far, *(minimax(image, int(x), int(y)) for x, y in points)]).amin(0)

    to_positive = nearest(prompt.positives)
    return (to_positive < nearest(prompt.negatives)) & (to_positive.sqrt() / 255 < edge)


@pytest.mark.parametrize("levels", [2, 4, 256], ids=["flat regions", "many ties", "few ties"])
def test_masks_equal_a_reference_watershed_to_the_pixel(levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    segmenter = WatershedSegmenter(edge=0.6)
    shares = []
    for _ in range(4):
        image = (torch.randint(levels, (3, 9, 14), generator=generator) * (255 // (levels - 1))).to(torch.uint8)
        xs, ys = (torch.randint(side, (5,), generator=generator).tolist() for side in (14, 9))
        points = list(zip(xs, ys, strict=True))
        prompts = [
            PointPrompt(positives=(points[0],)),
            PointPrompt(positives=(points[0],), negatives=(points[1],)),
            PointPrompt(positives=(points[1],), negatives=(points[0],)),
            PointPrompt(positives=(points[0], points[2]), negatives=(points[1], points[3], points[4])),
        ]
        masks = segmenter.masks(segmenter.embed(image), prompts)
        for mask, prompt in zip(masks, prompts, strict=True):
            assert torch.equal(mask, slow_mask(image, prompt, 0.6))
            shares.append(mask.float().mean().item())
    assert len(set(shares)) > 3, "the prompts must give different masks"


def test_an_edge_as_large_as_the_limit_is_not_crossed() -> None:
    image = torch.zeros(3, 1, 2, dtype=torch.uint8)
    image[0, 0, 1] = 51
    prompt = PointPrompt(positives=((0, 0),))
    widths = [int(s.masks(s.embed(image), [prompt]).sum()) for s in map(WatershedSegmenter, (0.2, 0.2001))]
    assert widths == [1, 2]


def test_points_are_rounded_and_kept_inside_an_image_that_is_no_square() -> None:
    generator = torch.Generator().manual_seed(3)
    image = torch.randint(256, (3, 5, 9), generator=generator, dtype=torch.uint8)
    segmenter = WatershedSegmenter(edge=0.01)  # Every pixel is a separate object.
    points = [(8.0, 4.0), (7.6, 3.7), (20.0, 99.0), (-4.0, 2.2)]
    masks = segmenter.masks(segmenter.embed(image), [PointPrompt(positives=(point,)) for point in points])
    assert [mask.nonzero().tolist() for mask in masks] == [[[4, 8]], [[4, 8]], [[4, 8]], [[2, 0]]]
