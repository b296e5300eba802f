"""The complete pretraining of the small Qwen2.5-VL on drawn scenes."""

from __future__ import annotations

from pathlib import Path

import torch

from visual_grpo.starter.job import Advance
from visual_grpo.starter.qwen2_5_vl.model import build_model, build_processor
from visual_grpo.starter.qwen2_5_vl.next_token_training import pretrain
from visual_grpo.third_party_output import hidden_progress_bars


def pretrain_vl(folder: Path, size: tuple[int, int], steps: int, seed: int, advance: Advance) -> None:
    """Trains model and processor and saves them to ``folder``; ``size`` = (height, width) in pixels.

    Runs in a separate process on one thread, so that the weights do not depend on the number of cores.
    """
    torch.set_num_threads(1)
    with hidden_progress_bars():
        processor = build_processor(*size)
        model = build_model(processor, seed)
        pretrain(model, processor, size=size, steps=steps, seed=seed, report=lambda done: advance("vl", done))
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
