"""The world of pairs: edits of two drawn sources, and the small FLUX.2 klein that is pretrained on them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from examples.flow_models.text_encoders import PROMPT_TOKENS
from examples.pairs.edits import PROMPTS, TwoSourceEdit, draw_dataset
from examples.pairs.pretrain_klein import pretrain_klein, velocity
from visual_grpo.common.images import read_image
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import ModelConfig
from visual_grpo.models.families.flux2_klein import FAMILY, Flux2Klein, Flux2KleinOptions
from visual_grpo.models.family_check import check_family
from visual_grpo.starter.pretraining import Job
from visual_grpo.starter.shapes.render import COMBINATIONS, stacked
from visual_grpo.starter.shapes.shapes_reward import ShapesReward

SIDE = 64
OPTIONS = Flux2KleinOptions(max_sequence_length=PROMPT_TOKENS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "pairs"
    draw_dataset(folder, 1, SIDE, SIDE, 0)
    return folder


@pytest.fixture(scope="module")
def records(folder: Path) -> list[PromptRecord]:
    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return [
        PromptRecord(
            id=line["id"],
            prompt=line["prompt"],
            source_images=tuple(folder / name for name in line["source_image"]),
            metadata={**line["metadata"], "target": line["target_image"]},
        )
        for line in lines
    ]


def shown(paths: list[Path]) -> list[Tensor]:
    return list(stacked([read_image(path) for path in paths]))


def all_right(records: list[PromptRecord], samples: list[Tensor]) -> Tensor:
    return ShapesReward()(records, samples).parts["all"]


def test_the_targets_are_right_and_the_sources_are_not(folder: Path, records: list[PromptRecord]) -> None:
    assert [record.metadata["shape"] for record in records] == [thing.shape for thing in COMBINATIONS]
    assert {record.prompt for record in records} == set(PROMPTS)
    assert all_right(records, shown([folder / record.metadata["target"] for record in records])).all()
    for place in range(2):
        assert not all_right(records, shown([record.source_images[place] for record in records])).any()


def test_other_sources_or_another_prompt_ask_for_another_picture() -> None:
    rng = random.Random(1)
    pairs = [TwoSourceEdit.draw(thing, rng.randrange(2), rng) for thing in COMBINATIONS]
    targets = list(stacked([pair.pictures(SIDE, SIDE, rng)[2] for pair in pairs]))
    for others in (
        [replace(pair, sources=pair.sources[::-1]) for pair in pairs],
        [replace(pair, place=1 - pair.place) for pair in pairs],
    ):
        asked = [PromptRecord(id="", prompt="", metadata=vars(pair.target)) for pair in others]
        assert not all_right(asked, targets).any()


def test_a_pair_is_drawn_from_both_sources() -> None:
    pair = TwoSourceEdit.draw(COMBINATIONS[0], 1, random.Random(0))
    assert pair.sources[1] == COMBINATIONS[0]
    assert pair.target == replace(COMBINATIONS[0], color=pair.sources[0].color)
    assert pair.sources[0].color != pair.sources[1].color


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("klein")
    job = Job(folder=folder, height=SIDE, width=SIDE, seed=1, task="i2i", steps={"vae": 1, "dit": 2})
    reached: list[tuple[str, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("examples.pairs.pretrain_klein._COPIES", 1)
        pretrain_klein(job, lambda module, done: reached.append((module, done)))
    assert reached[-2:] == [("dit", 1), ("dit", 2)]
    return folder


@pytest.mark.slow  # The family's own tests do this with a random model.
def test_its_small_model_is_a_klein_that_draws_as_its_pipeline_does(small: Path) -> None:
    cpu = ModelConfig(path="unused", device="cpu")
    findings = check_family(FAMILY, str(small), cpu, (SIDE, 96), OPTIONS, 3.0)
    assert [finding for finding in findings if not finding.passed] == []


@torch.no_grad()
def test_it_is_pretrained_on_what_the_family_gives_its_transformer(small: Path, records: list[PromptRecord]) -> None:
    pipeline = DiffusionPipeline.from_pretrained(small)
    generator = torch.Generator().manual_seed(0)
    for weight in pipeline.transformer.parameters():
        weight.normal_(std=0.1, generator=generator)
    family, asked = Flux2Klein(pipeline, (SIDE, SIDE), OPTIONS), records[:3]
    conditions = family.conditions(asked, [0] * len(asked), 1.0)
    noisy = torch.randn(len(asked), *family.latent_shape, generator=generator)
    expected = family.velocity(conditions, torch.arange(len(asked)))(noisy, 700.0)
    tokens = torch.cat([reference.tokens for reference in conditions.references])
    sources = tokens.unflatten(1, (2, *family.latent_shape[1:])).movedim(-1, 2)
    texts = torch.cat([*conditions.prompts])
    given = velocity(pipeline.transformer, noisy, torch.full((len(asked),), 0.7), texts, sources)
    torch.testing.assert_close(given, expected)
    assert not torch.allclose(
        velocity(pipeline.transformer, noisy, torch.full((len(asked),), 0.7), texts, sources.flip(1)), expected
    )
