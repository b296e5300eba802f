"""Measures in every frame of a video where the shape is and how large, and rewards how closely it moves as asked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from examples.motion.clips import MOTIONS, SHAPES, states
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import Needs, PromptRecord, RewardOutput, VideoSample
from visual_grpo.starter.shapes.render import BACKGROUND, COLORS

_OBJECT, _EDGE = 0.25, 0.5
"""A pixel belongs to the shape if its RGB distance (0..1 per channel) from the background is above `_OBJECT` and above
this share of the frame's largest: halfway, where a blurred edge has its original place."""
_LEAST = 0.005
"""Share of a frame's pixels below which there is no shape."""
_AREAS: Mapping[str, float] = {"circle": math.pi, "square": 4.0}
"""Area of a shape of radius 1."""
_FILLED: Mapping[str, float] = {"circle": math.pi / 4, "square": 1.0}
"""Share of its box that a shape fills."""
_FAR, _RIGHT = 0.25, 0.1
"""Distance of centre and radius from what is asked at which closeness is 0, and the most that is right."""
_COLOR_FAR, _COLOR_RIGHT = 0.6, 0.25
"""RGB distances."""
_FILL_FAR = 0.3


class MovingShapeReward:
    """Closeness, 0..1, to what the prompt asks for: a mean over colour, shape and, counted twice, motion, each of which
    is a mean over the frames.

    Parts: each of them, and ``all``, 1 where colour and shape are right on average and centre and radius in every
    frame. A frame without a shape scores 0.
    """

    needs = Needs(video=True)
    measure = ("all", "videos all right")

    def check_records(self, records: Sequence[PromptRecord]) -> None:
        """Raises UserError for a record whose metadata do not say what is asked for."""
        for record in records:
            for name, known in (("color", COLORS), ("shape", SHAPES), ("motion", MOTIONS)):
                if record.metadata.get(name) not in known:
                    raise UserError(
                        f"record {record.id!r}: moving_shapes needs metadata {name}, one of {', '.join(known)}, got"
                        f" {record.metadata.get(name)!r}"
                    )

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[VideoSample]) -> RewardOutput:
        judged = torch.stack([_judge(record, sample) for record, sample in zip(prompts, samples, strict=True)])
        color, shape, motion, right = judged.unbind(1)
        return RewardOutput(
            values=(color + shape + 2 * motion) / 4,
            parts={"color": color, "shape": shape, "motion": motion, "all": right},
        )


def _judge(record: PromptRecord, sample: VideoSample) -> Tensor:
    """[4]: closeness of colour, shape and motion, and whether all is right."""
    asked = record.metadata
    rgb = sample.frames.cpu().float() / 255
    distance = (rgb - torch.tensor(BACKGROUND).view(3, 1, 1) / 255).norm(dim=1)
    mask = distance > (_EDGE * distance.amax((1, 2), keepdim=True)).clamp(min=_OBJECT)
    there = mask.float().mean((1, 2)) >= _LEAST
    if not there.any():
        return torch.zeros(4)
    state, filled = _measured(mask, asked["shape"])
    away = (state - states(asked["motion"], len(mask))).norm(dim=1)
    means = (rgb * mask[:, None]).sum((2, 3)) / mask.sum((1, 2))[:, None].clamp(min=1)
    distances = torch.cdist(means, torch.tensor(list(COLORS.values())) / 255)
    color = distances[:, list(COLORS).index(asked["color"])]
    fills = (filled[:, None] - torch.tensor(list(_FILLED.values()))).abs()
    fill = fills[:, SHAPES.index(asked["shape"])]
    close = torch.stack([1 - color / _COLOR_FAR, 1 - fill / _FILL_FAR, 1 - away / _FAR]).clamp(min=0) * there
    nearest = distances[there].mean(0).argmin() == list(COLORS).index(asked["color"])
    is_shape = fills[there].mean(0).argmin() == SHAPES.index(asked["shape"])
    right = there.all() & nearest & (color.mean() <= _COLOR_RIGHT) & is_shape & (away <= _RIGHT).all()
    return torch.cat([close.mean(1), right.float()[None]])


def _measured(mask: Tensor, shape: str) -> tuple[Tensor, Tensor]:
    """[F, height, width] bool -> centre x, y and radius [F, 3], and the share of its box that is filled [F]."""
    _, height, width = mask.shape
    rows, columns = mask.any(2), mask.any(1)
    area = mask.sum((1, 2)).float()
    (top, bottom), (left, right) = _ends(rows), _ends(columns)
    high, wide = bottom - top, right - left
    center = torch.stack([(left + right) / 2 / width, (top + bottom) / 2 / height], 1)
    radius = (area / _AREAS[shape]).sqrt() / min(height, width)
    return torch.cat([center, radius[:, None]], 1), area / (high * wide).clamp(min=1)


def _ends(occupied: Tensor) -> tuple[Tensor, Tensor]:
    """[F, n] bool -> the first occupied place of each frame, and one past the last; [F] float32, 0 where none is."""
    places = torch.arange(occupied.shape[1])
    last = torch.where(occupied, places + 1, 0).amax(1)
    first = torch.where(occupied, places, occupied.shape[1]).amin(1)
    return torch.minimum(first, last).float(), last.float()
