"""Videos in an evaluation: they are kept as they were scored, play in the report, and are strips in pictures."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from tests.evaluation.painter import EVAL_SAMPLER, records
from tests.evaluation.reports import written
from visual_grpo.common.images import to_pil
from visual_grpo.common.types import PromptRecord, VideoSample
from visual_grpo.common.videos import encoded_video, frame_name, read_frames
from visual_grpo.config import AlarmConfig, EvaluationConfig, RewardConfig, SamplerConfig
from visual_grpo.evaluation.alarm import HackingMonitor
from visual_grpo.evaluation.pictures import LEADING, STRIP, WIDTH, data_uri, of_file, of_sample, scaled
from visual_grpo.evaluation.samples import Asked, generate_and_score, plan_images
from visual_grpo.rewards.build import build_reward_set

FRAMES, SIDE = 5, 32
REWARDS = {
    "brightness": RewardConfig(function="tests.evaluation.painter:brightness", frames="all"),
    "motion": RewardConfig(function=None, weight=0.0),
}
SCORER = build_reward_set(REWARDS, {"brightness": 1.0, "motion": 0.0})
SPLITS = {"held_out": records("held_out", 4), "eval": records("eval", 12)}
ASKED = plan_images(SPLITS, EvaluationConfig(every=0, prompts=1, images_per_prompt=1), {"eval": EVAL_SAMPLER})


class Filmer:
    """A square that moves to the right ``step`` pixels a frame, before a ground that is brighter by ``gain``."""

    def __init__(self, gain: float = 0.0, step: int = 3) -> None:
        self.gain, self.step = gain, step

    def generate(
        self, prompts: Sequence[PromptRecord], seeds: Sequence[int], sampler: SamplerConfig
    ) -> list[VideoSample]:
        return [self._film(seed) for seed in seeds]

    def _film(self, seed: int) -> VideoSample:
        ground = torch.rand(1, generator=torch.Generator().manual_seed(seed)) * 0.4 + self.gain
        frames = (ground * 255).expand(FRAMES, 3, SIDE, SIDE).clone()
        for time in range(FRAMES):
            frames[time, :, 8:20, 4 + self.step * time : 16 + self.step * time] = 250
        return VideoSample(frames=frames.to(torch.uint8), fps=8.0)


def filmed(folder: Path, filmer: Filmer, asked: Asked = ASKED) -> pd.DataFrame:
    return generate_and_score(filmer, SCORER, asked, folder, batch_size=4)


def test_videos_are_kept_as_they_were_scored(tmp_path: Path) -> None:
    table = filmed(tmp_path, Filmer())
    for row in table.to_dict("records"):
        frames = read_frames(tmp_path / row["file"], FRAMES)
        again = SCORER([PromptRecord(id=row["id"], prompt="")], [VideoSample(frames=frames, fps=8.0)])
        assert row["total"] == float(again.total)
        assert row["reward/motion"] == float(again.rewards["motion"]) > 0


def test_a_picture_of_a_video_is_a_strip_and_of_a_file_the_same(tmp_path: Path) -> None:
    [video] = Filmer().generate([], [1], EVAL_SAMPLER)
    strip = of_sample(PromptRecord(id="1", prompt=""), video, SCORER)
    assert (strip.width, strip.height) == (WIDTH, STRIP * (WIDTH + LEADING))
    (tmp_path / "a.webp").write_bytes(encoded_video(video))
    assert strip.tobytes() == of_file(tmp_path / "a.webp").tobytes()
    still = VideoSample(frames=video.frames[:1].expand(FRAMES, -1, -1, -1), fps=8.0)
    (tmp_path / "b.webp").write_bytes(encoded_video(still))
    assert of_file(tmp_path / "b.webp").size == strip.size
    flat = VideoSample(frames=torch.full((STRIP, 3, SIDE, SIDE), 30, dtype=torch.uint8), fps=8.0)
    shown = np.asarray(scaled(of_sample(PromptRecord(id="1", prompt=""), flat, SCORER)))
    assert {*np.unique(shown)} == {30, 255}, "no line that is not in the frames"


def test_the_report_plays_the_videos(tmp_path: Path) -> None:
    before = filmed(tmp_path / "baseline", Filmer())
    page = written(tmp_path, before, filmed(tmp_path / "trained", Filmer(0.2)))
    text = (page / "evaluation.html").read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    pairs = json.loads(found.group(1))
    assert len(pairs) == 16
    for pair in pairs:
        for side in ("baseline", "trained"):
            shown: Any = Image.open(io.BytesIO(base64.b64decode(pair[side].partition(",")[2])))
            assert (shown.n_frames, shown.info["loop"]) == (FRAMES, 0)
    with Image.open(page / "samples.png") as sheet:
        assert sheet.height > 2 * STRIP * 200, "both sides are strips"


def test_the_report_plays_the_target(tmp_path: Path) -> None:
    [video] = Filmer().generate([], [1], EVAL_SAMPLER)
    (tmp_path / "frames").mkdir()
    for number, frame in enumerate(video.frames):
        to_pil(frame).save(frame_name(tmp_path / "frames", number))
    [request, *_] = ASKED["eval"][1]
    record = replace(request.record, target_image=tmp_path / "frames")
    asked = {"eval": (EVAL_SAMPLER, [replace(request, record=record)])}
    before, after = (filmed(tmp_path / side, Filmer(), asked) for side in ("baseline", "trained"))
    page = written(tmp_path, before, after)
    shown = re.search(r'src="data:image/webp;base64,([^"]*)"><small>target<', (page / "evaluation.html").read_text())
    assert shown is not None
    (tmp_path / "shown.webp").write_bytes(base64.b64decode(shown.group(1)))
    assert (read_frames(tmp_path / "shown.webp", FRAMES).float() - video.frames).abs().mean() < 20


def test_a_small_copy_plays_as_long_as_the_video(tmp_path: Path) -> None:
    [video] = Filmer().generate([], [1], EVAL_SAMPLER)
    (tmp_path / "a.webp").write_bytes(encoded_video(video))
    file = tmp_path / "small.webp"
    file.write_bytes(base64.b64decode(data_uri(tmp_path / "a.webp", 16).partition(",")[2]))
    frames = read_frames(file, FRAMES).float()
    assert frames.shape == (FRAMES, 3, 16, 16)
    small = torch.nn.functional.interpolate(video.frames.float(), (16, 16), mode="area")
    assert (frames - small).abs().mean() < 20


@pytest.mark.parametrize(("step", "alarms"), [(3, False), (0, True)])
def test_an_alarm_is_raised_where_the_reward_rises_and_the_videos_stand_still(
    tmp_path: Path, step: int, alarms: bool
) -> None:
    filmed(tmp_path, Filmer())
    monitor = HackingMonitor(tmp_path, AlarmConfig(), looks=2, weights={"brightness": 1.0, "motion": 0.0})
    asked = ASKED["eval"][1][4:]
    shown = [request.record for request in asked]
    samples = Filmer(0.2, step).generate(shown, [request.seed for request in asked], EVAL_SAMPLER)
    scores = SCORER(shown, samples)
    look = monitor.look(shown, samples, scores.total, scores.rewards)
    assert (look.alarm is not None) == alarms
    if alarms:
        assert "motion fell by 100%" in str(look.alarm)
    distance = next(one for one in look.watched if one.name == "distance")
    assert 0.1 < distance.change < 0.4, "of every frame from the base model's frame of its time"
