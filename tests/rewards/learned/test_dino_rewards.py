"""The rewards over DINOv2 against plain transformers at equal weights."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoImageProcessor, Dinov2Model

from tests.rewards.learned.tiny import picture, record
from visual_grpo.rewards.learned.clip import ClipScore
from visual_grpo.rewards.learned.dino import DinoIdentity, DinoStructure, GroupDiversity
from visual_grpo.rewards.reward import FunctionReward

SOURCES = [picture(0), picture(1, 60, 40)]
SAMPLES = [picture(2), picture(3, 40, 40)]


@pytest.fixture
def prompts(tmp_path: Path) -> list[Any]:
    return [
        record(name, folder=tmp_path, source=source, target=target)
        for name, source, target in zip("ab", SOURCES, [picture(4), picture(5)], strict=True)
    ]


def plain(folder: Path, image: Tensor) -> Any:
    model = Dinov2Model.from_pretrained(folder, attn_implementation="eager").eval()
    pixels = AutoImageProcessor.from_pretrained(folder)(image, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        return model(pixels, output_hidden_states=True), model


def by_hand(folder: Path, image: Tensor) -> Tensor:
    """[n, n] cosines of the last layer's keys, written out from the state that enters the layer."""
    outputs, model = plain(folder, image)
    layer = model.encoder.layer[-1]
    keys = layer.attention.k_proj(layer.norm1(outputs.hidden_states[-2]))[0, 1:].detach()
    return torch.nn.functional.cosine_similarity(keys[:, None], keys[None], dim=-1)


def test_identity_is_the_cosine_of_the_class_tokens(dino_folder: Path, prompts: list[Any]) -> None:
    tokens = [[plain(dino_folder, image)[0].last_hidden_state[0, 0] for image in pair] for pair in
              zip(SAMPLES, SOURCES, strict=True)]  # fmt: skip
    expected = [float(torch.nn.functional.cosine_similarity(one, other, dim=0)) for one, other in tokens]
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


A, B, ALONE = record("a"), record("b"), record("alone")


def flat(value: int, side: int = 32) -> Tensor:
    return torch.full((3, side, side), value, dtype=torch.uint8)


def test_each_samples_mean_distance_to_the_others_of_its_prompt() -> None:
    found = GroupDiversity()([A, A, A, B, B, ALONE], [flat(0), flat(51), flat(255), flat(9), flat(9), flat(0)])
    assert found[:5].tolist() == pytest.approx([(0.2 + 1) / 2, (0.2 + 0.8) / 2, (1 + 0.8) / 2, 0, 0])
    assert found[5].isnan()
    assert GroupDiversity.needs.whole_groups


def test_samples_of_other_sizes_compare_and_fine_noise_is_no_variety() -> None:
    assert GroupDiversity()([A, A], [flat(0, 32), flat(255, 48)]).tolist() == [1, 1]
    noise = [torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
             for seed in (0, 1)]  # fmt: skip
    assert GroupDiversity()([A, A], noise).max() < 0.15


def test_by_a_models_features(clip_folder: Path, dino_folder: Path) -> None:
    images = [picture(seed) for seed in range(3)]
    encoders = {
        "clip": (clip_folder, ClipScore(model=str(clip_folder)).encoder.images),
        "dino": (dino_folder, DinoIdentity(model=str(dino_folder)).encoder.images),
    }
    for features, (folder, embed) in encoders.items():
        unit = embed(images)
        expected = torch.zeros(3)
        for one, other in itertools.permutations(range(3), 2):
            expected[one] += (1 - unit[one] @ unit[other]) / 2
        reward = GroupDiversity(features=features, model=str(folder))
        reward.check_machine()
        assert reward([A] * 3, images).tolist() == pytest.approx(expected.tolist(), abs=1e-6)
        assert expected.min() > 1e-3
        assert reward([A] * 2, [images[0]] * 2).tolist() == pytest.approx([0, 0], abs=1e-6)
