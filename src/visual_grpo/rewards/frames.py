"""Makes a reward of images one of videos: it scores frames, whose mean or minimum counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import Needs, PromptRecord, RewardOutput, VideoSample
from visual_grpo.common.videos import frame_name
from visual_grpo.rewards.outputs import checked_output, put_together
from visual_grpo.rewards.reward import PROMPTS, SAMPLES, CalledByName

Chosen = Literal["all", "first"] | int
"""Frames that are scored; N = every Nth, from the first."""
_COMBINED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda scores: scores.mean(0),
    "minimum": lambda scores: scores.amin(0),
}


class PerFrame:
    """``function``, a reward of images, on the chosen frames of videos; other attributes are the function's, but for
    Python's own (``__code__``), by which this would be taken for the function itself.

    A frame's target is the frame at the same time of the target. The number of frames has no effect on a mean, so that
    longer videos do not score higher.
    """

    def __init__(self, name: str, function: Any, frames: Chosen, over_frames: Literal["mean", "minimum"]) -> None:
        own = getattr(function, "needs", Needs())
        if own.video:
            raise UserError(f"rewards.{name}.frames is {frames}, but {name} judges whole videos: leave frames out.")
        self.name, self.function, self.frames, self.over_frames = name, function, frames, over_frames
        self._call = CalledByName(f"reward {name!r}", function, PROMPTS, SAMPLES)
        self.needs = replace(own, video=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.function, name)

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[VideoSample]) -> RewardOutput:
        """Scores the B samples of one time in one call, so that rewards that compare a group see whole groups.

        Raises UserError for videos of different lengths.
        """
        lengths = {len(sample.frames) for sample in samples}
        if len(lengths) > 1:
            raise UserError(f"reward {self.name!r}: expected videos of one length, got {sorted(lengths)} frames")
        step = {"all": 1, "first": max(lengths, default=1)}.get(str(self.frames)) or int(self.frames)
        return self._combined([self._at(frame, prompts, samples) for frame in range(0, max(lengths, default=0), step)])

    def _at(self, frame: int, prompts: Sequence[PromptRecord], samples: Sequence[VideoSample]) -> RewardOutput:
        records = [
            record
            if record.target_image is None
            else replace(record, target_image=frame_name(record.target_image, frame))
            for record in prompts
        ]
        returned = self._call(records, [sample.frames[frame] for sample in samples])
        return checked_output(self.name, returned, prompts)

    def _combined(self, outputs: Sequence[RewardOutput]) -> RewardOutput:
        """A sample is unscored if one of its frames is, and its part is if one of its frames lacks that part."""
        combine = _COMBINED[self.over_frames]
        combined = put_together(outputs, lambda of: combine(torch.stack(of)), lambda of: torch.stack(of).sum(0))
        return replace(combined, failed={row: why for output in outputs for row, why in output.failed.items()})
