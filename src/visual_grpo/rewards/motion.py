"""Rewards of videos by optical flow and by changes that the next frame undoes; no weights are needed.

A reward that compares neighbouring frames alone is highest for a video that stands still, which policies find. So
`MotionConsistency` asks what share of the change is explained by motion, and of a video that moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.images import LUMA
from visual_grpo.common.types import Needs, PromptRecord, RewardOutput, VideoSample

_FLOW_SIDE, _FLICKER_SIDE = 256, 64
"""Pixels of the longer side to which frames are reduced before they are compared."""
_BLUR = 1.0
"""Standard deviation in pixels of the blur that takes noise off before motion is looked for."""
_APART, _PIXELS = 0.01, 0.05
"""How far the ways there and back may miss each other, squared: a share of theirs, and pixels (Sundaram, Brox and
Keutzer, Dense point trajectories by GPU-accelerated large displacement optical flow, ECCV 2010, with a tenth of their
pixels: in small frames noise agrees by chance)."""


@dataclass(frozen=True)
class MotionConsistency:
    """Share, 0..1, of the change between neighbouring frames that optical flow explains: 1 - |warped error| / |change|.

    Smooth motion scores near 1, noise, flicker and objects that change their form near 0. A video that stands still has
    no change that could be explained, and scores 0: stillness is not rewarded. Below ``least_motion`` the score shrinks
    in proportion to the motion; above it, more motion gives no more. Parts: ``explained``, the share without that, and
    ``motion``, as the guard of that name measures it.

    Args:
        least_motion: in heights of the frame a second, averaged over all pixels. A shape that fills a tenth of the
            frame and crosses its height in a second has 0.1.
    """

    least_motion: float = 0.02
    needs = Needs(video=True)

    def __post_init__(self) -> None:
        if not self.least_motion > 0:
            raise UserError(f"motion_consistency: least_motion must be above 0, got {self.least_motion}")

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[VideoSample]) -> RewardOutput:
        moved = [_moved(sample) for sample in samples]
        explained, motion = (torch.tensor(values, dtype=torch.float32) for values in zip(*moved, strict=True))
        enough = (motion / self.least_motion).clamp(max=1)
        return RewardOutput(values=explained * enough, parts={"explained": explained, "motion": motion})


class Motion:
    """Mean length of the optical flow between neighbouring frames, in heights of the frame a second, times the share of
    their change that it explains. A guard against videos that stand still.

    Only flow counts that the flow from the next frame back agrees with: a match for noise can be found in each
    direction, but not the same one.
    """

    guard = "its videos move less"
    needs = Needs(video=True)

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[VideoSample]) -> list[float]:
        return [_moved(sample)[1] for sample in samples]


class Flicker:
    """Minus the mean change of luma (0..255) between two frames that the next frame undoes: 0 for steady motion, about
    -10 where brightness plainly flickers.

    Of a change and the one after it in the other direction the smaller counts, so that an edge that moves on is no
    flicker. Frames are reduced to 64 pixels, which leaves little of fine noise.
    """

    guard = "its videos flicker more"
    needs = Needs(video=True)

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[VideoSample]) -> list[float]:
        return [self._undone(_lumas(sample, _FLICKER_SIDE, 3, "flicker")) for sample in samples]

    def _undone(self, lumas: Tensor) -> float:
        change = lumas.diff(dim=0)
        before, after = change[:-1], change[1:]
        undone = torch.minimum(before.abs(), after.abs()) * (before.sign() != after.sign())
        return -float(undone.mean()) + 0.0  # not -0.0 where nothing is undone


def _moved(sample: VideoSample) -> tuple[float, float]:
    """Returns the share of the change that optical flow explains, and the motion, in heights a second."""
    lumas = _lumas(sample, _FLOW_SIDE, 2, "motion").numpy()
    lumas = np.stack([cv2.GaussianBlur(luma, (0, 0), _BLUR) for luma in lumas]).round().astype(np.uint8)
    finder = cv2.DISOpticalFlow.create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)
    height, width = lumas.shape[1:]
    columns, rows = np.meshgrid(np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32))
    change = explained = steady = length = 0.0
    for before, after in pairwise(lumas):
        flow, back = (
            finder.calc(*pair, np.zeros((height, width, 2), np.float32)) for pair in ((before, after), (after, before))
        )
        moved, returned = (
            cv2.remap(
                there, columns + flow[..., 0], rows + flow[..., 1], cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE
            )
            for there in (after, back)
        )
        changed, left = (np.abs(one.astype(np.float64) - before) for one in (after, moved))
        agrees = _squared(flow + returned) <= _APART * (_squared(flow) + _squared(returned)) + _PIXELS
        change += float(changed.mean())
        explained += float((changed - left).mean())
        steady += float((agrees * (changed - left)).mean())
        length += float((agrees * np.sqrt(_squared(flow))).mean())
    if not change:
        return 0.0, 0.0
    return max(0.0, explained / change), max(0.0, steady / change) * length / (len(lumas) - 1) * sample.fps / height


def _squared(flow: np.ndarray) -> np.ndarray:
    """Squared length, [height, width], of vectors [height, width, 2]."""
    return (flow**2).sum(-1)


def _lumas(sample: VideoSample, side: int, least: int, reward: str) -> Tensor:
    """[F, h, w] float32 in 0..255, at most ``side`` pixels a side. Raises UserError for fewer than ``least`` frames."""
    if len(sample.frames) < least:
        raise UserError(f"{reward}: a video needs at least {least} frames, got {len(sample.frames)}")
    lumas = (sample.frames.cpu().float() * torch.tensor(LUMA)[:, None, None]).sum(1, keepdim=True)
    scale = min(1.0, side / max(lumas.shape[-2:]))
    size = [max(16, round(length * scale)) for length in lumas.shape[-2:]]
    return F.interpolate(lumas, size, mode="area")[:, 0]
