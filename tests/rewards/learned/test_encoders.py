"""The rewards over CLIP and DINOv2 against plain transformers at equal weights."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor
from transformers import AutoImageProcessor, CLIPModel, CLIPProcessor, Dinov2Model

from tests.rewards.learned.tiny import LONGEST, SIDE, perceptron, picture, record
from visual_grpo.common.errors import UserError
from visual_grpo.common.images import to_pil, to_tensor
from visual_grpo.rewards.learned.clip import Aesthetic, ClipScore, Hps, PickScore
from visual_grpo.rewards.learned.dino import DinoIdentity, DinoStructure
from visual_grpo.rewards.reward import FunctionReward

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
    for kind, expected in ((ClipScore, cosines), (PickScore, logits)):
        assert kind(model=str(clip_folder))(PROMPTS, IMAGES).tolist() == pytest.approx(expected, abs=1e-5)
    for made in (Hps(), PickScore()):
        assert made.encoder.processing.path == "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


def test_hps_pads_what_is_not_square(clip_folder: Path) -> None:
    """hpsv2 1.2.0: ``resize_longest_max`` with black beside the picture."""
    images = [picture(1, 64, 32), picture(2, 30, 60), picture(3, 40, 40)]
    padded = [to_tensor(ImageOps.pad(to_pil(image), (SIDE, SIDE), Image.Resampling.BICUBIC)) for image in images]
    found, whole, cropped = (
        kind(model=str(clip_folder))(PROMPTS, shown)
        for kind, shown in ((Hps, images), (ClipScore, padded), (ClipScore, images))
    )
    torch.testing.assert_close(found, whole, atol=2e-3, rtol=0)
    assert (found - cropped)[:2].abs().min() > 0.02, "the test would not see a crop"
    assert found[2] == cropped[2]


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
    refused("not a head for embeddings of width 8: (?s:.*)size mismatch for layers.0.weight")
    torch.save({"layers.0.weight": torch.zeros(1, 8)}, head / "aesthetic-model.pth")
    refused("(?s:.*)Missing key.*layers.0.bias")
    (head / "aesthetic-model.pth").unlink()
    refused("this folder lacks aesthetic-model.pth")


SOURCES = [picture(0), picture(1, 60, 40)]
SAMPLES = [picture(2), picture(3, 40, 40)]


@pytest.fixture
def prompts(tmp_path: Path) -> list[Any]:
    return [
        record(name, folder=tmp_path, source=source, target=target)
        for name, source, target in zip("ab", SOURCES, [picture(4), picture(5)], strict=True)
    ]


def plain_dino(folder: Path, image: Tensor) -> Any:
    model = Dinov2Model.from_pretrained(folder, attn_implementation="eager").eval()
    pixels = AutoImageProcessor.from_pretrained(folder)(image, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        return model(pixels, output_hidden_states=True), model


def by_hand(folder: Path, image: Tensor) -> Tensor:
    """[n, n] cosines of the last layer's keys, written out from the state that enters the layer."""
    outputs, model = plain_dino(folder, image)
    layer = model.encoder.layer[-1]
    keys = layer.attention.k_proj(layer.norm1(outputs.hidden_states[-2]))[0, 1:].detach()
    return torch.nn.functional.cosine_similarity(keys[:, None], keys[None], dim=-1)


def test_identity_is_the_cosine_of_the_class_tokens(dino_folder: Path, prompts: list[Any]) -> None:
    tokens = [plain_dino(dino_folder, image)[0].pooler_output[0] for image in (*SAMPLES, *SOURCES)]
    expected = torch.nn.functional.cosine_similarity(torch.stack(tokens[:2]), torch.stack(tokens[2:])).tolist()
    found = DinoIdentity(model=str(dino_folder))(prompts, SAMPLES)
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    assert max(expected) < 0.999, "the test would not see a wrong pair"
    assert DinoIdentity(model=str(dino_folder))(prompts, SOURCES).tolist() == pytest.approx([1, 1], abs=1e-5)


def test_structure_compares_the_self_similarity_of_keys(dino_folder: Path, prompts: list[Any]) -> None:
    expected = [
        1 - float((by_hand(dino_folder, sample) - by_hand(dino_folder, source)).square().mean())
        for sample, source in zip(SAMPLES, SOURCES, strict=True)
    ]
    reward = DinoStructure(model=str(dino_folder))
    assert reward(prompts, SAMPLES).tolist() == pytest.approx(expected, abs=1e-5)
    assert max(expected) < 0.99
    assert reward(prompts, SOURCES).tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize("kind", [DinoIdentity, DinoStructure])
def test_the_nearest_source_counts(kind: Any, dino_folder: Path, prompts: list[Any]) -> None:
    both = replace(prompts[0], source_images=(*prompts[1].source_images, *prompts[0].source_images))
    reward = kind(model=str(dino_folder))
    assert reward([both], [SOURCES[0]]).item() == pytest.approx(1, abs=1e-5)
    assert reward([replace(both, source_images=())], [SOURCES[0]]).isnan().all()
    to_target = kind(model=str(dino_folder), against="target")
    assert to_target(prompts, [picture(4), picture(5)]).tolist() == pytest.approx([1, 1], abs=1e-5)
    assert FunctionReward("x", to_target).needs.target
    assert not FunctionReward("x", to_target).needs.source
