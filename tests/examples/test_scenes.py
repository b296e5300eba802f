"""Drawn scenes, the training data of the small Qwen2.5-VL, and the complete starter with very few steps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import distance_transform_edt
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

import examples.scenes.pretrain_vl as pretraining
from examples.scenes.pretrain_vl import pretrain_vl
from examples.scenes.scenes import ANSWER_LENGTH, Scenes, answer_tokens, boxes, draw_scene_records, draw_scenes
from examples.scenes.small_qwen2_5_vl import build_model, build_processor
from tests.starter.tasks import weights_are_equal
from visual_grpo.common.types import PromptRecord, TextSample
from visual_grpo.config import DataConfig, StarterConfig
from visual_grpo.models.families.qwen2_5_vl import AnswerModel, Options
from visual_grpo.models.tokens.interface import TokenTrajectory
from visual_grpo.models.tokens.token_policy import token_log_probs
from visual_grpo.rewards.segmentation.answer import parse_answer
from visual_grpo.starter.build import model_recipe
from visual_grpo.starter.pretraining import Job, digest_of

SIZE = (48, 64)


@pytest.fixture(scope="module")
def scenes() -> Scenes:
    return draw_scenes(48, *SIZE, np.random.default_rng(1))


@pytest.fixture
def small_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretraining, "_BATCH", 6)
    monkeypatch.setattr(pretraining, "POOL", 100)


def test_a_scene_is_one_object_of_two_touching_parts(scenes: Scenes) -> None:
    gaps = []
    for image, parts, asked, truth in zip(scenes.images, scenes.parts, scenes.asked, scenes.truths, strict=True):
        assert set(np.unique(parts)) == {-1, 0, 1}
        assert np.array_equal(truth, parts == asked)
        apart = distance_transform_edt(parts != 0)[parts == 1].min()
        gaps.append(apart)
        light, plain, ground = (image[parts == part].mean(0) for part in (1, 0, -1))
        assert (light - plain).min() > 25
        assert plain.max() - ground.max() > 60
    assert np.mean(np.array(gaps) == 1) > 0.8
    assert max(gaps) < 4


def test_the_digest_depends_on_the_seed_and_the_steps() -> None:
    data = DataConfig(path="unused", task="segmentation", height=64, width=64)
    steps = {"vae_steps": 1, "dit_steps": 1, "ar_steps": 1}
    configs = [
        StarterConfig(world="examples.scenes:WORLD", dataset="a", model="b", records_per_prompt=1, vl_steps=n, **steps)
        for n in (2, 3)
    ]
    assert (
        len({digest_of(model_recipe(config, data, "qwen2_5_vl", seed)) for config in configs for seed in (3, 4)}) == 4
    )


def test_the_records_match_the_drawn_scenes(tmp_path: Path) -> None:
    digest = draw_scene_records(tmp_path / "a", 2, *SIZE, seed=3)
    records = [json.loads(line) for line in (tmp_path / "a" / "records.jsonl").read_text().splitlines()]
    assert len(records) == len({record["id"] for record in records}) == 16
    for record in records:
        mask = np.asarray(Image.open(tmp_path / "a" / record["mask"])) > 0
        image = np.asarray(Image.open(tmp_path / "a" / record["image"])).astype(int)
        ((x, y),), color = record["points"], record["query"].split()[1]
        assert mask[y, x]
        assert boxes(mask[None])[0].tolist() == record["box"]
        strongest = {"red": [0], "green": [1], "blue": [2], "yellow": [0, 1]}[color]
        assert image[mask].mean(0)[strongest].min() > 2 * np.delete(image[mask].mean(0), strongest).max() * 0.6
    kept = (tmp_path / "a" / "records.jsonl").stat().st_mtime_ns
    assert draw_scene_records(tmp_path / "a", 2, *SIZE, seed=3) == digest
    assert (tmp_path / "a" / "records.jsonl").stat().st_mtime_ns == kept
    assert draw_scene_records(tmp_path / "a", 2, *SIZE, seed=4) != digest


def test_an_answer_is_a_token_for_each_piece_and_reads_back() -> None:
    tokenizer = build_processor(*SIZE).tokenizer
    numbers = torch.tensor([[1, 22, 33, 44, 5, 40, 0, 12]])
    said = answer_tokens(tokenizer, numbers)[0].tolist()
    assert len(said) == ANSWER_LENGTH == 18
    text = tokenizer.decode(said[:-1])
    assert tokenizer(text)["input_ids"] == said[:-1]
    got = parse_answer(TextSample(text=text, finished=said[-1] == tokenizer.eos_token_id, frame=SIZE), SIZE)
    assert (got.box, got.points, got.negatives) == ((1, 22, 33, 44), ((5, 40),), ((0, 12),))


@torch.no_grad()
def test_the_pretraining_gives_the_log_probs_of_the_policy(small_batch: None, tmp_path: Path) -> None:
    """The forward pass of the pretraining gives the same log-probs as the sampler and scorer of GRPO."""
    processor = build_processor(*SIZE)
    model = build_model(processor, seed=0)
    pool = pretraining.build_pool(processor, *SIZE, seed=0, count=60)
    lesson = pretraining._Lesson(model, processor, pool, SIZE, torch.Generator().manual_seed(0))
    images, _, numbers, queries = lesson._batch()
    taught, targets = lesson._answer_log_probs(queries, lesson._encode_images(images), numbers)
    lesson.hook.remove()
    records = []
    for row, (image, query) in enumerate(zip(images, queries, strict=True)):
        path = tmp_path / f"{row}.png"
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
        words = processor.tokenizer.decode(query).split("<|vision_end|>")[1].split("<|im_end|>")[0]
        records.append(PromptRecord(id=str(row), prompt=words, source_images=(path,)))
    said = AnswerModel(model, processor, Options(max_tokens=ANSWER_LENGTH))
    said.bias = None  # No tokens are suppressed during pretraining.
    trajectory = TokenTrajectory(
        prompts=said.encode(records),
        prompt_of_row=torch.arange(len(records)),
        tokens=targets,
        mask=torch.ones_like(targets, dtype=torch.bool),
    )
    scored = token_log_probs(said, trajectory, torch.arange(len(records)), 1.0)
    torch.testing.assert_close(taught.gather(2, targets[..., None])[..., 0], scored, rtol=0, atol=1e-5)


def test_the_same_seed_gives_the_same_weights_bit_for_bit(small_batch: None, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    for name in "ab":
        job = Job(folder=tmp_path / name, height=64, width=64, seed=3, steps={"vl": 2})
        pretrain_vl(job, lambda module, done: None)
    assert weights_are_equal(tmp_path / "a", tmp_path / "b") == [True]
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "a")
    untrained = dict(build_model(build_processor(64, 64), 3).named_parameters())
    assert all(not torch.equal(untrained[name], value) for name, value in model.named_parameters())
    processor = AutoProcessor.from_pretrained(tmp_path / "a")
    prompt = pretraining.prompt_of(processor, "light red")
    inputs = processor(text=[prompt], images=[Image.new("RGB", (64, 64))], return_tensors="pt")
    assert model(**inputs).logits.isfinite().all()
