"""The rewards over DINOv2 against plain transformers at equal weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoImageProcessor, Dinov2Model

from tests.rewards.learned.tiny import picture, record
from visual_grpo.rewards.learned.dino import DinoIdentity, DinoStructure
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
    samples, sources = ([plain(dino_folder, image)[0].pooler_output[0] for image in own] for own in (SAMPLES, SOURCES))
    expected = torch.nn.functional.cosine_similarity(torch.stack(samples), torch.stack(sources)).tolist()
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
