"""The rewards over CLIP against plain transformers at equal weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CLIPModel, CLIPProcessor

from tests.rewards.learned.tiny import LONGEST, picture, record
from visual_grpo.rewards.learned.clip import ClipScore, PickScore

PROMPTS = [record("a", "a red cat"), record("b", "the dog on the mat"), record("c", "")]
IMAGES = [picture(0), picture(1, 64, 32), picture(2, 20, 30)]


def plain(folder: Path, prompt: str, image: Tensor) -> Any:
    """What transformers itself says of one pair."""
    model = CLIPModel.from_pretrained(folder).eval()
    inputs = CLIPProcessor.from_pretrained(folder)(text=[prompt], images=[image], return_tensors="pt")
    with torch.no_grad():
        return model(**inputs)


def test_clip_score_is_the_cosine_of_both_embeddings(clip_folder: Path) -> None:
    found = ClipScore(model=str(clip_folder))(PROMPTS, IMAGES)
    outputs = [plain(clip_folder, record.prompt, image) for record, image in zip(PROMPTS, IMAGES, strict=True)]
    expected = [float((output.image_embeds[0] * output.text_embeds[0]).sum()) for output in outputs]
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.05, "the test would not see which image goes with which text"


def test_pick_score_is_the_logit_over_26(clip_folder: Path) -> None:
    found = PickScore(model=str(clip_folder))(PROMPTS, IMAGES)
    outputs = [plain(clip_folder, record.prompt, image) for record, image in zip(PROMPTS, IMAGES, strict=True)]
    assert found.tolist() == pytest.approx([float(output.logits_per_image[0, 0]) / 26 for output in outputs], abs=1e-5)


def test_a_prompt_beyond_the_models_length(clip_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    reward = ClipScore(model=str(clip_folder))
    words = LONGEST - 2  # Beside the tokens of begin and end.
    fits, long = " ".join(["cat"] * words), " ".join(["cat"] * words + ["dog"] * 20)
    with caplog.at_level(logging.WARNING):
        one, other = reward([record("fits", fits), record("long", long)], [picture(0)] * 2).tolist()
    assert one == other
    assert f"reads the first {LONGEST} tokens of a prompt; 1 longer" in caplog.text
    caplog.clear()
    reward([record("long", long)], [picture(1)])
    assert not caplog.text, "a prompt is told once"


def test_half_precision_is_near(clip_folder: Path) -> None:
    full, half = (ClipScore(model=str(clip_folder), dtype=dtype)(PROMPTS, IMAGES) for dtype in ("float32", "bfloat16"))
    assert half.dtype == torch.float32
    assert 0 < (full - half).abs().max() < 0.05


def test_two_rewards_over_one_model_hold_its_weights_once(clip_folder: Path) -> None:
    assert ClipScore(model=str(clip_folder)).encoder.model is PickScore(model=str(clip_folder)).encoder.model
