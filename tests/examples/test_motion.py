"""The world of shapes that move: its drawings, its reward measured from the frames, and its small Wan."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.motion.clips import FPS, FRAMES, MOTIONS, SCENES, Scene, draw_all, draw_dataset
from examples.motion.moving_shapes import MovingShapeReward
from examples.motion.pretrain_wan import MISREADINGS, misread, pretrain_wan
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord, VideoSample
from visual_grpo.common.videos import read_frames
from visual_grpo.config import ModelConfig, SamplerConfig
from visual_grpo.models.families.wan import FAMILY, WanOptions
from visual_grpo.models.family_check import check_family
from visual_grpo.starter.pretraining import Job
from visual_grpo.training.components import load_model

SIDE = 32
OPTIONS: Any = {"max_sequence_length": 12}
RECORDS = [PromptRecord(id=str(n), prompt=scene.prompt, metadata=asdict(scene)) for n, scene in enumerate(SCENES)]


@pytest.fixture(scope="module")
def videos() -> list[VideoSample]:
    return [VideoSample(frames=frames, fps=FPS) for frames in draw_all(1, SIDE, SIDE, 3)[:, 0]]


def all_right(records: list[PromptRecord], samples: list[VideoSample]) -> torch.Tensor:
    return MovingShapeReward()(records, samples).parts["all"]


def test_every_scene_is_judged_right(videos: list[VideoSample]) -> None:
    output = MovingShapeReward()(RECORDS, videos)
    assert output.parts["all"].all()
    assert output.values.min() > 0.9


def asking_for(**other: str) -> list[PromptRecord]:
    """The records with another word; those that had it already are left out by the caller."""
    return [replace(record, metadata={**record.metadata, **other}) for record in RECORDS]


@pytest.mark.parametrize(
    ("attribute", "words"),
    [("motion", list(MOTIONS)), ("color", ["red", "blue"]), ("shape", ["circle", "square"])],
)
def test_what_is_not_as_asked_is_wrong_and_scores_less(
    videos: list[VideoSample], attribute: str, words: list[str]
) -> None:
    own = MovingShapeReward()(RECORDS, videos).values
    for word in words:
        others = [row for row, scene in enumerate(SCENES) if getattr(scene, attribute) != word]
        asked, shown = [asking_for(**{attribute: word})[row] for row in others], [videos[row] for row in others]
        output = MovingShapeReward()(asked, shown)
        assert not output.parts["all"].any()
        assert (output.values < own[others]).all()


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "stands still": lambda frames: frames[:1].expand_as(frames),
    "runs backwards": lambda frames: frames.flip(0),
    "is gone in a frame": lambda frames: torch.cat([frames[:2], torch.full_like(frames[:1], 30), frames[3:]]),
    "is empty": lambda frames: torch.full_like(frames, 30),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_video_that_does_not_move_as_asked_is_wrong(videos: list[VideoSample], name: str) -> None:
    rows = [row for row, scene in enumerate(SCENES) if scene.motion != "stays"]
    changed = [replace(videos[row], frames=CHANGES[name](videos[row].frames)) for row in rows]
    asked = [RECORDS[row] for row in rows]
    before, after = (MovingShapeReward()(asked, shown) for shown in ([videos[row] for row in rows], changed))
    assert not after.parts["all"].any()
    assert (after.values < before.values).all()


def test_records_that_do_not_say_what_is_asked_for_are_refused() -> None:
    whole = asdict(SCENES[0])
    for name in whole:
        with pytest.raises(UserError, match=f"record 'x': moving_shapes needs metadata {name}, one of"):
            MovingShapeReward().check_records([PromptRecord(id="x", prompt="a cat", metadata={**whole, name: "none"})])


def test_the_dataset_has_a_video_of_every_scene(tmp_path: Path) -> None:
    draw_dataset(tmp_path / "motion", 2, SIDE, SIDE, 0)
    lines = [json.loads(line) for line in (tmp_path / "motion/records.jsonl").read_text().splitlines()]
    assert [Scene(**line["metadata"]) for line in lines] == [*SCENES, *SCENES]
    shown = [read_frames(tmp_path / "motion" / line["target_image"], FRAMES) for line in lines[:20]]
    records = [PromptRecord(id=line["id"], prompt=line["prompt"], metadata=line["metadata"]) for line in lines[:20]]
    assert all_right(records, [VideoSample(frames=frames, fps=FPS) for frames in shown]).all()


def test_the_flawed_model_misreads_nearly_half_of_three_motions() -> None:
    rng = random.Random(0)
    for motion in MOTIONS:
        scene = Scene(color="red", shape="circle", motion=motion)
        drawn = Counter(misread(scene, rng) for _ in range(400))
        instead, share = MISREADINGS.get(motion, (motion, 0.0))
        assert set(drawn) == {scene, replace(scene, motion=instead)}
        assert abs(drawn[scene] / 400 - (1 - share)) < 0.08


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wan")
    reached: list[tuple[str, int]] = []
    job = Job(folder=folder, height=SIDE, width=SIDE, seed=1, steps={"vae": 1, "dit": 2})
    pretrain_wan(job, lambda module, done: reached.append((module, done)))
    assert reached == [("vae", 1), ("dit", 1), ("dit", 2)]
    return folder


@pytest.mark.slow  # The family's own tests do this with a random model.
def test_its_small_model_is_a_wan_that_draws_as_its_pipeline_does(small: Path) -> None:
    cpu = ModelConfig(path="unused", device="cpu")
    findings = check_family(FAMILY, str(small), cpu, (SIDE, 64), WanOptions(**OPTIONS), 3.0, FRAMES)
    assert [finding for finding in findings if not finding.passed] == []


def test_its_small_model_is_loaded_and_draws_videos(small: Path) -> None:
    model = load_model(str(small), size=(SIDE, SIDE), frames=FRAMES, fps=FPS, options=OPTIONS, device="cpu")
    drawn = model.generate(RECORDS[:2], [0, 1], SamplerConfig(steps=2, guidance_scale=1.0))
    assert [video.frames.shape for video in drawn] == [(FRAMES, 3, SIDE, SIDE)] * 2
