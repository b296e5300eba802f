"""Diversity within a group, by hand."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.rewards.learned.tiny import picture, record
from visual_grpo.rewards.learned.clip import ClipScore
from visual_grpo.rewards.learned.dino import DinoIdentity
from visual_grpo.rewards.learned.diversity import GroupDiversity

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
    coarse, fine = GroupDiversity()([A, A], noise), GroupDiversity(side=64)([A, A], noise)
    assert coarse.max() < 0.15 < 0.35 < fine.min()


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
