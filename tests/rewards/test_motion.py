"""Rewards of whole videos on drawn ones: what moves smoothly, stands still, flickers, or is noise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord, VideoSample
from visual_grpo.rewards.guards import Exposure
from visual_grpo.rewards.motion import Flicker, Motion, MotionConsistency

RECORD = PromptRecord(id="1", prompt="a square moves to the right")
SIDE, SQUARE = 64, 16


def video(
    step: float = 0.0,
    *,
    noise: float = 0.0,
    flicker: float = 0.0,
    place: Callable[[int], tuple[int, int]] | None = None,
    frames: int = 9,
    fps: float = 8.0,
) -> VideoSample:
    """A square that moves ``step`` pixels to the right a frame, with noise, or brightness that goes up and down."""
    generator, shown = torch.Generator().manual_seed(0), []
    for time in range(frames):
        frame = torch.full((3, SIDE, SIDE), 110.0)
        left, top = place(time) if place else (4 + round(step * time), 20)
        frame[:, top : top + SQUARE, left : left + SQUARE] = torch.tensor([220.0, 60.0, 40.0])[:, None, None]
        frame += noise * torch.randn(frame.shape, generator=generator) + flicker * (-1) ** time
        shown.append(frame.clamp(0, 255).to(torch.uint8))
    return VideoSample(frames=torch.stack(shown), fps=fps)


STILL, RIGHT = video(0.0), video(4.0)
JUMPING = video(place=lambda time: (37 * time % 48, 23 * time % 48))


def consistency(sample: VideoSample, least_motion: float = 0.02) -> float:
    return float(MotionConsistency(least_motion)([RECORD], [sample]).values)


def motion(sample: VideoSample) -> float:
    return Motion()([RECORD], [sample])[0]


def test_smooth_motion_is_consistent_and_stillness_is_not_rewarded() -> None:
    assert consistency(RIGHT) > 0.95
    assert consistency(video(2.0)) > 0.95
    assert consistency(STILL) == 0
    for worse in (JUMPING, video(noise=60.0), video(noise=3.0), video(flicker=10.0), video(4.0, flicker=10.0)):
        assert consistency(worse) < 0.3


def test_below_the_floor_the_score_is_in_proportion_to_the_motion() -> None:
    sample = video(1.0)
    moved = motion(sample)
    explained = float(MotionConsistency()([RECORD], [sample]).parts["explained"])
    assert consistency(sample, 10 * moved) == pytest.approx(explained / 10, rel=1e-5)
    assert consistency(sample, moved / 2) == pytest.approx(explained, rel=1e-5)


def test_motion_is_in_heights_a_second() -> None:
    """Of a frame that moves as a whole, what leaves at the right coming in at the left."""
    texture = torch.nn.functional.interpolate(
        torch.rand(1, 3, 16, 32, generator=torch.Generator().manual_seed(0)), (SIDE, 2 * SIDE), mode="bicubic"
    )[0]
    frames = [(texture.roll(2 * time, 2).clamp(0, 1) * 255).to(torch.uint8) for time in range(9)]
    assert motion(VideoSample(frames=torch.stack(frames), fps=8.0)) == pytest.approx(2 * 8 / SIDE, rel=0.2)
    assert motion(STILL) == 0
    assert motion(video(4.0, fps=16.0)) == pytest.approx(2 * motion(video(4.0, fps=8.0)))
    assert motion(video(noise=3.0)) < motion(video(1.0)) < motion(RIGHT)


@pytest.mark.parametrize("fps", [8.0, 16.0, 24.0])
@pytest.mark.parametrize("cell", [1, 4, 8])
def test_noise_is_no_motion(cell: int, fps: float) -> None:
    """Of pixels and of blocks, in which optical flow finds something like the next frame everywhere."""
    generator = torch.Generator().manual_seed(cell)
    drawn = torch.randint(0, 256, (9, 3, 96 // cell, 128 // cell), generator=generator).to(torch.uint8)
    noise = VideoSample(frames=drawn.repeat_interleave(cell, 2).repeat_interleave(cell, 3), fps=fps)
    assert motion(noise) < 0.02, "which is least_motion"
    assert consistency(noise) < 0.2


def test_flicker_is_a_change_that_is_undone() -> None:
    def flicker(sample: VideoSample) -> float:
        return Flicker()([RECORD], [sample])[0]

    assert flicker(STILL) == flicker(RIGHT) == 0, "what moves on does not flicker"
    assert flicker(video(flicker=10.0)) == pytest.approx(-20, rel=0.05)
    assert flicker(video(noise=20.0)) < -3
    assert -1 < flicker(JUMPING) < 0


def test_exposure_counts_what_is_neither_black_nor_white() -> None:
    image = torch.full((3, 10, 10), 100, dtype=torch.uint8)
    image[:, :2], image[:, 2] = 255, 0
    assert Exposure()([RECORD], [image]) == [pytest.approx(0.7)]


@pytest.mark.parametrize(("reward", "frames", "told"), [(Motion, 1, "at least 2"), (Flicker, 2, "at least 3 frames")])
def test_too_few_frames_are_told(reward: type[Motion] | type[Flicker], frames: int, told: str) -> None:
    with pytest.raises(UserError, match=told):
        reward()([RECORD], [video(frames=frames)])


def test_a_floor_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="least_motion must be above 0"):
        MotionConsistency(0.0)
