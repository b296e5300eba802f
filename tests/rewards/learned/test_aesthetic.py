"""The aesthetic predictor against a plain multi-layer perceptron at equal weights, and HPS against its formula."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import CLIPModel, CLIPProcessor

from tests.rewards.learned.tiny import picture, record
from visual_grpo.errors import UserError
from visual_grpo.rewards.learned.clip import Aesthetic, Hps

WIDTH = 8
IMAGES = [picture(0), picture(1, 64, 32)]
PROMPTS = [record("a", "a red cat"), record("b", "the mat")]


def perceptron(width: int = WIDTH) -> nn.Module:
    """As the predictor was trained, with the dropout that numbers its layers 0, 2, 4, 6 and 7."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Sequential(
            nn.Linear(width, 1024),
            nn.Dropout(0.2),
            nn.Linear(1024, 128),
            nn.Dropout(0.2),
            nn.Linear(128, 64),
            nn.Dropout(0.1),
            nn.Linear(64, 16),
            nn.Linear(16, 1),
        )
    return nn.ModuleDict({"layers": layers}).eval()


@pytest.fixture
def head(tmp_path: Path) -> Path:
    torch.save(perceptron().state_dict(), tmp_path / "aesthetic-model.pth")
    return tmp_path / "aesthetic-model.pth"


def test_the_mark_of_a_plain_perceptron(clip_folder: Path, head: Path) -> None:
    model, processor = CLIPModel.from_pretrained(clip_folder).eval(), CLIPProcessor.from_pretrained(clip_folder)
    with torch.no_grad():
        outputs = [model(**processor(text="a", images=[image], return_tensors="pt")) for image in IMAGES]
        layers = dict(perceptron().named_children())["layers"]
        expected = [float(layers(output.image_embeds)[0, 0]) for output in outputs]
    for given in (head, head.parent):
        reward = Aesthetic(model=str(clip_folder), head=str(given))
        reward.check_machine()
        assert reward(PROMPTS, IMAGES).tolist() == pytest.approx(expected, abs=1e-5)
    assert abs(expected[0] - expected[1]) > 1e-3


def test_heads_that_do_not_fit_are_refused(clip_folder: Path, tmp_path: Path) -> None:
    def refused(told: str) -> None:
        with pytest.raises(UserError, match=told):
            Aesthetic(model=str(clip_folder), head=str(tmp_path / "head.safetensors"))(PROMPTS, IMAGES)

    refused("its head is '.*head.safetensors', which is not a file")
    save_file(perceptron(16).state_dict(), tmp_path / "head.safetensors")
    refused("must have linear layers layers.N from 8, .*; got 16-1024-128-64-16-1")
    save_file({"weight": torch.zeros(1)}, tmp_path / "head.safetensors")
    refused("got none")
    save_file({"layers.0.weight": torch.zeros(1, 8)}, tmp_path / "head.safetensors")
    refused("lacks layers.0.bias")
    save_file(
        {f"layers.{n}.{part}": torch.zeros(shape) for n, rows in enumerate((4, 1)) for part, shape in
         (("weight", (rows, 8)), ("bias", (rows,)))},
        tmp_path / "head.safetensors",
    )  # fmt: skip
    refused("got 8-8-1")


def test_hps_is_the_plain_cosine(clip_folder: Path) -> None:
    model, processor = CLIPModel.from_pretrained(clip_folder).eval(), CLIPProcessor.from_pretrained(clip_folder)
    expected = []
    for prompt, image in zip(PROMPTS, IMAGES, strict=True):
        with torch.no_grad():
            logits = model(**processor(text=prompt.prompt, images=[image], return_tensors="pt")).logits_per_image
        expected.append(float(logits[0, 0] / model.logit_scale.detach().exp()))
    assert Hps(model=str(clip_folder))(PROMPTS, IMAGES).tolist() == pytest.approx(expected, abs=1e-5)
    assert Hps().encoder.processing.path == "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
