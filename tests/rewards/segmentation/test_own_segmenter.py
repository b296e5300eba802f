"""Segmenters of the user's: what they are given, what they must return, and the documented one on photographs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from sklearn.datasets import load_sample_image
from torch import Tensor

from tests.markdown import blocks
from visual_grpo.common.errors import UserError
from visual_grpo.common.images import to_tensor
from visual_grpo.rewards.negative_points import NegativePointsReward
from visual_grpo.rewards.segmentation import PointPrompt, Segmenter, build_segmenter

HERE = "tests.rewards.segmentation.test_own_segmenter"
SIDE = 96
BOX = (11, 11, 84, 84)
"""Of the flower in the scenes."""
POINTS = [PointPrompt(positives=((2, 1),)), PointPrompt(positives=((2, 1),), negatives=((5, 2),))]


def block(image: Tensor, prompt: PointPrompt, side: int = 2) -> Tensor:
    """A square beside the first point, without the column of a negative; it paints into the image."""
    assert not image.any(), "the image of another prompt"
    image[:] = 9
    (x, y), mask = prompt.positives[0], torch.zeros(image.shape[1:], dtype=torch.bool)
    mask[int(y) : int(y) + side, int(x) : int(x) + side] = True
    for x, _ in prompt.negatives:
        mask[:, int(x)] = False
    return mask


class Counted:
    """Embeds an image as the number of those before."""

    def __init__(self, first: int) -> None:
        self.number = first

    def embed(self, image: Tensor) -> int:
        self.number += 1
        return self.number

    def __call__(self, embedding: int, prompt: PointPrompt) -> NDArray[np.bool_]:
        return np.arange(12).reshape(3, 4) < embedding

    def check_machine(self) -> None:
        raise UserError("no weights")


class Mute:
    pass


RUBBISH: list[Any] = [None, True, torch.ones(3, 4), torch.ones(4, 3).bool(), np.ones((3, 4)), [[True] * 4] * 3]


def rubbish(image: Tensor, prompt: PointPrompt) -> Any:
    return RUBBISH[int(prompt.positives[0][0])]


def masks(segmenter: Segmenter, prompts: list[PointPrompt], size: tuple[int, int] = (4, 8)) -> Tensor:
    return segmenter.masks(segmenter.embed(torch.zeros(3, *size, dtype=torch.uint8)), prompts)


def test_a_function_gets_its_options_and_a_fresh_image_for_every_prompt() -> None:
    segmenter = build_segmenter({"function": f"{HERE}:block", "side": 3})
    found = masks(segmenter, [*POINTS, PointPrompt(positives=((4, 0),), negatives=((5, 2),))])
    assert (found.dtype, found.shape) == (torch.bool, (3, 4, 8))
    assert found.sum((1, 2)).tolist() == [9, 9, 6]
    assert masks(segmenter, []).shape == (0, 4, 8)


def test_an_image_is_embedded_once_and_weights_are_looked_for() -> None:
    segmenter = build_segmenter({"function": f"{HERE}:Counted", "first": 4})
    assert masks(segmenter, POINTS, (3, 4)).sum((1, 2)).tolist() == [5, 5]
    assert masks(segmenter, POINTS, (3, 4)).sum((1, 2)).tolist() == [6, 6]
    with pytest.raises(UserError, match="no weights"):
        NegativePointsReward(segmenter={"function": f"{HERE}:Counted", "first": 4}).check_machine()


@pytest.mark.parametrize("row", range(len(RUBBISH)))
def test_what_is_no_mask_is_refused(row: int) -> None:
    with pytest.raises(UserError, match=rf"segmenter '{HERE}:rubbish' must return a mask of bool \[3, 4\], .* got "):
        masks(build_segmenter({"function": f"{HERE}:rubbish"}), [PointPrompt(positives=((row, 0),))], (3, 4))


def scene(seed: int) -> tuple[Tensor, Tensor, PointPrompt, PointPrompt]:
    """A photograph of a flower under a patch of another one; its mask; a point in it, and one in the patch too."""
    china, flower = (Image.fromarray(load_sample_image(f"{name}.jpg")) for name in ("china", "flower"))
    generator = np.random.default_rng(seed)
    photograph, truth = flower.crop((127, 40, 487, 400)).resize((SIDE, SIDE)), Image.new("L", (SIDE, SIDE))
    ImageDraw.Draw(truth).ellipse(BOX, fill=255)
    x, y = int(generator.integers(540)), int(generator.integers(120, 350))
    width, height = (int(side) for side in generator.integers(24, 40, 2))
    angle = 2 * np.pi * generator.random()
    middle, inside = ([round(48 + by * f(angle)) for f in (np.cos, np.sin)] for by in (27, -15))
    left, top = middle[0] - width // 2, middle[1] - height // 2
    patch = china.crop((x, y, x + 2 * width, y + 2 * height)).resize((width, height))
    photograph.paste(patch, (left, top))
    truth.paste(0, (left, top, left + width, top + height))
    positives, negatives = ((inside[0], inside[1]),), ((middle[0], middle[1]),)
    without, with_ = (PointPrompt(positives=positives, negatives=given, box=BOX) for given in ((), negatives))
    return to_tensor(photograph), to_tensor(truth.convert("RGB"))[0] > 0, without, with_


def test_the_documented_one_heeds_a_negative_point_on_photographs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [text] = [block.text for block in blocks("python") if block.file == "my_segmenter.py"]
    (tmp_path / "my_segmenter.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_segmenter", raising=False)
    segmenter = build_segmenter({"function": "my_segmenter:segment"})
    ious = []
    for seed in range(12):
        image, truth, *prompts = scene(seed)
        found = segmenter.masks(segmenter.embed(image), prompts)
        ious.append([float((mask & truth).sum() / (mask | truth).sum()) for mask in found])
    without, with_ = np.mean(ious, 0)
    assert (without, with_) == pytest.approx((0.86, 0.94), abs=0.01), "as documented"
