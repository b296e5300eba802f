"""A policy that answers with the position of a white square, and a reward for it: text samples for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from visual_grpo.common.images import read_image, to_tensor
from visual_grpo.common.types import PromptRecord, RewardOutput, Sample, TextSample
from visual_grpo.config import SamplerConfig

SIDE, SQUARE = 32, 8
RED = torch.tensor([255, 0, 0], dtype=torch.uint8)


class Answerer:
    """Answers ``"LEFT"``, the first column of the square; its errors shrink by ``skill`` (0..1)."""

    def __init__(self, skill: float = 0.0) -> None:
        self.skill = skill

    def generate(self, records: Sequence[PromptRecord], seeds: Sequence[int], sampler: SamplerConfig) -> list[Sample]:
        return [self._answer(record, seed) for record, seed in zip(records, seeds, strict=True)]

    def _answer(self, record: PromptRecord, seed: int) -> TextSample:
        error = 1 + int(torch.randint(6, (1,), generator=torch.Generator().manual_seed(seed)))
        left = record.metadata["left"] + round(error * (1 - self.skill))
        return TextSample(text=str(left), finished=True, frame=(SIDE, SIDE))


class Overlap:
    """IoU of the answer's columns with the square's; paints the answer's in red."""

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[TextSample]) -> RewardOutput:
        shifts = [abs(int(s.text) - p.metadata["left"]) for p, s in zip(prompts, samples, strict=True)]
        inside = torch.tensor([float(max(0, SQUARE - shift)) for shift in shifts])
        union = 2 * SQUARE - inside
        return RewardOutput(values=inside / union, ratios={"ciou": (inside, union)})

    def picture(self, record: PromptRecord, sample: TextSample) -> Tensor:
        image = to_tensor(read_image(record.source_images[0]))
        left = int(sample.text)
        image[:, :, left : left + SQUARE] = RED[:, None, None]
        return image


def records(folder: Path, split: str, count: int) -> list[PromptRecord]:
    """Queries about a white square on black, each with a different image."""
    made = []
    for number in range(count):
        left = 2 * number
        image = Image.new("RGB", (SIDE, SIDE))
        image.paste("white", (left, 0, left + SQUARE, SQUARE))
        path = folder / f"{split}-{number}.png"
        image.save(path)
        made.append(
            PromptRecord(
                id=f"{split}-{number}",
                prompt="where is the square?",
                split=split,
                source_images=(path,),
                metadata={"left": left},
            )
        )
    return made
