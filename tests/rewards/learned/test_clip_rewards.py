"""The rewards over CLIP against plain transformers at equal weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CLIPModel, CLIPProcessor

from tests.rewards.learned.tiny import LONGEST, perceptron, picture, record
from visual_grpo.common.errors import UserError
from visual_grpo.rewards.learned.clip import Aesthetic, ClipScore, Hps, PickScore

PROMPTS = [record("a", "a red cat"), record("b", "the dog on the mat"), record("c", "")]
IMAGES = [picture(0), picture(1, 64, 32), picture(2, 20, 30)]


def plain(folder: Path, prompt: str, image: Tensor) -> Any:
    """What transformers itself says of one pair."""
    model = CLIPModel.from_pretrained(folder).eval()
    inputs = CLIPProcessor.from_pretrained(folder)(text=[prompt], images=[image], return_tensors="pt")
    with torch.no_grad():
        return model(**inputs)


def test_scores_are_the_cosines_of_both_embeddings_or_their_logit_over_26(clip_folder: Path) -> None:
    outputs = [plain(clip_folder, record.prompt, image) for record, image in zip(PROMPTS, IMAGES, strict=True)]
    cosines = [float((output.image_embeds[0] * output.text_embeds[0]).sum()) for output in outputs]
    logits = [float(output.logits_per_image[0, 0]) / 26 for output in outputs]
    assert max(cosines) - min(cosines) > 0.05, "the test would not see which image goes with which text"
    for kind, expected in ((ClipScore, cosines), (Hps, cosines), (PickScore, logits)):
        assert kind(model=str(clip_folder))(PROMPTS, IMAGES).tolist() == pytest.approx(expected, abs=1e-5)
    for made in (Hps(), PickScore()):
        assert made.encoder.processing.path == "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


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


@pytest.fixture
def head(tmp_path: Path) -> Path:
    torch.save(perceptron().state_dict(), tmp_path / "aesthetic-model.pth")
    return tmp_path


def test_the_mark_of_a_plain_perceptron(clip_folder: Path, head: Path) -> None:
    layers = perceptron()["layers"]
    expected = [float(layers(plain(clip_folder, "a", image).image_embeds)[0, 0]) for image in IMAGES]
    reward = Aesthetic(model=str(clip_folder), head=str(head))
    reward.check_machine()
    assert reward(PROMPTS, IMAGES).tolist() == pytest.approx(expected, abs=1e-5)
    assert abs(expected[0] - expected[1]) > 1e-3


def test_heads_that_do_not_fit_are_refused(clip_folder: Path, head: Path) -> None:
    def refused(told: str) -> None:
        with pytest.raises(UserError, match=told):
            Aesthetic(model=str(clip_folder), head=str(head))(PROMPTS, IMAGES)

    torch.save(perceptron(16).state_dict(), head / "aesthetic-model.pth")
    refused("no head for embeddings of width 8: (?s:.*)size mismatch for layers.0.weight")
    torch.save({"layers.0.weight": torch.zeros(1, 8)}, head / "aesthetic-model.pth")
    refused("(?s:.*)Missing key.*layers.0.bias")
    (head / "aesthetic-model.pth").unlink()
    refused("this folder lacks aesthetic-model.pth")
