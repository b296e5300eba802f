"""A policy that generates noise around a brightness: enough to generate, save, score and compare images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from visual_grpo.common.types import PromptRecord
from visual_grpo.config import SamplerConfig

EVAL_SAMPLER = SamplerConfig.model_validate({"steps": 10, "guidance_scale": 1.5})
ROLLOUT = SamplerConfig.model_validate(
    {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "steps": 4, "guidance_scale": 1.0}
)


class Painter:
    """Images of ``side`` pixels, brighter by ``gain`` (0..1) than those of an untrained painter."""

    def __init__(self, gain: float = 0.0, side: int = 32) -> None:
        self.gain, self.side = gain, side
        self.batches: list[int] = []
        self.adapters: dict[str, Any] = {}
        self.text_tokens = self.rollouts = None

    def generate(self, prompts: Sequence[PromptRecord], seeds: Sequence[int], sampler: SamplerConfig) -> list[Tensor]:
        self.batches.append(len(prompts))
        return [self._paint(seed + sampler.denoising()[0]) for seed in seeds]

    def _paint(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        base = torch.rand(1, generator=generator) * 0.5
        noise = torch.rand(3, self.side, self.side, generator=generator) * 0.1
        return ((base + noise + self.gain).clamp(0, 1) * 255).to(torch.uint8)


def brightness(prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> list[float]:
    """Mean of the pixels, 0..1."""
    return [float(sample.float().mean()) / 255 for sample in samples]


def brightness_by_words(prompts: Sequence[PromptRecord], samples: Sequence[Tensor], words: str) -> list[float]:
    """With an option that names a file."""
    return brightness(prompts, samples)


def records(split: str, prompts: int, per_prompt: int = 1) -> list[PromptRecord]:
    return [
        PromptRecord(id=f"{split}-{n:02d}-{k}", prompt=f"{split} prompt {n}", split=split)
        for n in range(prompts)
        for k in range(per_prompt)
    ]
