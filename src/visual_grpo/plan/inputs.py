"""What is planned or checked with, in the place of records and rewards that a user brings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from visual_grpo.config import Parameters, RewardConfig
from visual_grpo.plan.released.words import prompt_of
from visual_grpo.types import PromptRecord

REWARD = "planned"


@contextmanager
def records_for(config: Parameters, count: int) -> Iterator[list[PromptRecord]]:
    """Distinct prompts, with a blank picture where the task needs one."""
    data = config.data
    with TemporaryDirectory() as folder:
        sources: tuple[Path, ...] = ()
        if data.task in ("i2i", "segmentation"):
            sources = (_blank(Path(folder), data.height, data.width),)
        words = config.plan.prompt_words
        yield [
            PromptRecord(id=str(number), prompt=prompt_of(words, number), source_images=sources)
            for number in range(count)
        ]


def with_planned_reward(config: Parameters) -> Parameters:
    """The only reward of every module is the one called `REWARD`."""
    modules = {name: own.model_copy(update={"rewards": {}}) for name, own in config.modules.items()}
    return config.model_copy(update={"rewards": {REWARD: RewardConfig()}, "modules": modules})


def unequal_scores(count: int) -> Tensor:
    """[count] float32; different ones in every group, so that there is something to learn."""
    return torch.arange(count, dtype=torch.float32) % 7


def _blank(folder: Path, height: int, width: int) -> Path:
    from PIL import Image

    file = folder / "blank.png"
    Image.new("RGB", (width, height)).save(file)
    return file
