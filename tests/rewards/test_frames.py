"""A reward of images judges frames of videos, and none judges videos without saying how."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.images import to_pil
from visual_grpo.common.types import PromptRecord, RewardOutput, VideoSample
from visual_grpo.common.videos import frame_name
from visual_grpo.config import RewardConfig
from visual_grpo.rewards.build import build_reward
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.rewards.frames import PerFrame
from visual_grpo.rewards.reward import FunctionReward

HERE = "tests.rewards.test_frames"
RECORDS = [PromptRecord(id=name, prompt=name) for name in "aab"]


def video(*levels: int) -> VideoSample:
    """A frame of each level of grey."""
    return VideoSample(
        frames=torch.stack([torch.full((3, 32, 32), level, dtype=torch.uint8) for level in levels]), fps=8
    )


VIDEOS = [video(0, 50, 100, 200), video(10, 10, 10, 10), video(8, 6, 4, 2)]


def level(prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> RewardOutput:
    """NaN for frames of the level 4."""
    values = torch.stack([sample.float().mean() for sample in samples])
    values[values == 4] = torch.nan
    return RewardOutput(values=values, parts={"twice": 2 * values}, ratios={"share": (values, 0 * values + 1)})


def scored(frames: Any, over_frames: Any = "mean", function: str = f"{HERE}:level") -> RewardOutput:
    config = RewardConfig(function=function, frames=frames, over_frames=over_frames)
    return build_reward("level", config)(RECORDS, VIDEOS)


@pytest.mark.parametrize(
    ("frames", "over_frames", "expected"),
    [
        ("all", "mean", [87.5, 10, torch.nan]),
        ("all", "minimum", [0, 10, torch.nan]),
        ("first", "mean", [0, 10, 8]),
        (2, "mean", [50, 10, torch.nan]),
        (3, "minimum", [0, 10, 2]),
    ],
)
def test_frames_are_scored_and_combined(frames: Any, over_frames: Any, expected: list[float]) -> None:
    output, want = scored(frames, over_frames), torch.tensor(expected, dtype=torch.float32)
    torch.testing.assert_close(output.values, want, equal_nan=True)
    torch.testing.assert_close(output.parts["twice"], 2 * want, equal_nan=True)


def test_numerators_and_denominators_add_up() -> None:
    above, below = scored(2).ratios["share"]
    torch.testing.assert_close(above, torch.tensor([100, 20, torch.nan]), equal_nan=True)
    torch.testing.assert_close(below[:2], torch.tensor([2.0, 2.0]))


def by_images(prompts: Sequence[PromptRecord], images: Sequence[Tensor], scale: float = 1) -> list[float]:
    return [scale * float(image.float().mean()) for image in images]


@functools.wraps(by_images)
def decorated(*arguments: Any, **options: Any) -> list[float]:
    return by_images(*arguments, **options)


class ByVideos:
    def __init__(self, scale: float = 1) -> None:
        self.scale = scale

    def __call__(self, videos: Sequence[Tensor], prompts: Sequence[PromptRecord]) -> list[float]:
        return by_images(prompts, videos, self.scale)


@pytest.mark.parametrize(
    ("function", "scale"), [("by_images", 1), ("by_images", 2), ("decorated", 1), ("ByVideos", 1), ("ByVideos", 2)]
)
def test_frames_are_passed_by_whatever_name_the_reward_has_for_samples(function: str, scale: int) -> None:
    config = RewardConfig(function=f"{HERE}:{function}", frames="all", options={} if scale == 1 else {"scale": scale})
    reward = copy.deepcopy(build_reward("level", config))
    assert reward(RECORDS, VIDEOS).values.tolist() == [87.5 * scale, 10 * scale, 5 * scale]


def test_more_frames_do_not_score_higher() -> None:
    reward = build_reward("level", RewardConfig(function=f"{HERE}:level", frames="all"))
    assert float(reward(RECORDS[:1], [video(10, 10)]).values) == float(reward(RECORDS[:1], [video(*[10] * 9)]).values)


def test_a_group_is_compared_at_each_time() -> None:
    reward = build_reward("group_diversity", RewardConfig(function=None, frames="all"))
    away = [abs(first - second) / 255 for first, second in zip((0, 50, 100, 200), (10, 10, 10, 10), strict=True)]
    values = reward(RECORDS, VIDEOS).values
    torch.testing.assert_close(values[:2], torch.full((2,), sum(away) / 4))
    assert values[2].isnan()


def test_a_frame_is_compared_with_the_targets_frame_of_its_time(tmp_path: Path) -> None:
    for time, frame in enumerate(VIDEOS[0].frames):
        to_pil(frame).save(frame_name(tmp_path, time))
    record = PromptRecord(id="a", prompt="a", target_image=tmp_path)
    reward = build_reward("pixel", RewardConfig(function=None, frames="all"))
    assert reward([record, record], [VIDEOS[0], VIDEOS[0]]).values.tolist() == [1, 1]
    backwards = VideoSample(frames=VIDEOS[0].frames.flip(0), fps=8)
    assert float(reward([record], [backwards]).values) < 0.8


@pytest.mark.parametrize("lost", [0, 1])
def test_a_frame_that_no_server_scored_is_told_in_its_words(lost: int) -> None:
    frames = iter(range(2))

    def server(prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> RewardOutput:
        if next(frames) == lost:
            return RewardOutput(values=torch.full((1,), torch.nan), failed={0: "out of memory"})
        return level(prompts, samples)

    output = PerFrame("level", server, "all", "mean")(RECORDS[:1], [video(10, 20)])
    assert output.failed == {0: "out of memory"}
    for values in (output.values, output.parts["twice"], *output.ratios["share"]):
        assert values.isnan().tolist() == [True]


def test_videos_of_different_lengths_are_told() -> None:
    with pytest.raises(UserError, match=r"videos of one length, got \[2, 4\] frames"):
        build_reward("level", RewardConfig(function=f"{HERE}:level", frames="all"))(
            RECORDS[:2], [video(1, 2), VIDEOS[0]]
        )


def test_no_reward_judges_what_it_is_not_for() -> None:
    image = torch.zeros(3, 32, 32, dtype=torch.uint8)
    plain, per_frame = (
        build_reward("edge_density", RewardConfig(function=None, frames=each)) for each in (None, "all")
    )
    with pytest.raises(UserError, match=r"'edge_density' judges images, .* Set rewards.edge_density.frames to all"):
        plain(RECORDS[:1], VIDEOS[:1])
    with pytest.raises(UserError, match=r"'edge_density' judges videos, or has frames, .*: data.frames is null"):
        per_frame(RECORDS[:1], [image])
    with pytest.raises(UserError, match="motion judges whole videos: leave frames out"):
        build_reward("motion", RewardConfig(function=None, frames="all"))
    rewards = RewardSet(
        {"edge_density": (plain, 1.0), "motion": (build_reward("motion", RewardConfig(function=None)), 1.0)}
    )
    with pytest.raises(UserError, match="edge_density"):
        rewards.check_samples(videos=True)
    with pytest.raises(UserError, match="'motion' judges videos"):
        rewards.check_samples(videos=False)


def test_what_a_reward_does_to_a_frame_reaches_nobody() -> None:
    def painting(prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> list[float]:
        return [float(sample.zero_().sum()) for sample in samples]

    FunctionReward("painting", PerFrame("painting", painting, "all", "mean"))(RECORDS, VIDEOS)
    assert int(VIDEOS[0].frames[3].max()) == 200
