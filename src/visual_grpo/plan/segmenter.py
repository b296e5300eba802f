"""The segmenter that a reward asks, without weights: SAM 2 takes a part of the card beside the policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from visual_grpo.config import Parameters
from visual_grpo.plan.released.sam2 import LARGE, build
from visual_grpo.segmentation.sam2 import Sam2Segmenter
from visual_grpo.segmentation.segmenter import PointPrompt
from visual_grpo.types import PromptRecord, Sample

_PROMPTS = 2
"""A sample's answer is segmented with its negative points and without them."""


class PlannedSegmenter:
    """Judges samples by the project's own segmenter; ``network`` is None where the parameters name no SAM 2."""

    def __init__(self, config: Parameters) -> None:
        reward = config.rewards.get("negative_points")
        options: Any = {} if reward is None else reward.options.get("segmenter", {})
        self.network: nn.Module | None = None
        if not isinstance(options, dict) or options.get("kind") != "sam2":
            return
        given = {name: options[name] for name in ("dtype", "batch") if name in options}
        self._segmenter = Sam2Segmenter(LARGE, device="cpu", **given)
        self._segmenter.device = torch.device("meta")
        model, processor = build(getattr(torch, self._segmenter.dtype))
        vars(self._segmenter)["_loaded"] = model, processor  # What it would load at its first use.
        self.network = model

    def judge(self, prompts: Sequence[PromptRecord], samples: Sequence[Sample], size: tuple[int, int]) -> None:
        """Embeds the image of each distinct prompt once, and decodes the masks of its samples."""
        if self.network is None:
            return
        height, width = size
        point = PointPrompt(box=(0, 0, width // 2, height // 2), positives=((width // 4, height // 4),), negatives=())
        records = [record.id for record in prompts]
        for name in dict.fromkeys(records):
            embedding = self._segmenter.embed(torch.zeros(3, height, width, dtype=torch.uint8))
            self._segmenter.masks(embedding, [point] * (_PROMPTS * records.count(name)))
