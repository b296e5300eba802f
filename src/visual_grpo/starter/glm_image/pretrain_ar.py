"""Pretrains the small AR module to generate image tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GlmImageForConditionalGeneration

from visual_grpo.starter.glm_image.ar_batches import ArBatch
from visual_grpo.starter.optimise import Report, minimise


def pretrain_ar(
    model: GlmImageForConditionalGeneration, batches: Iterator[ArBatch], *, steps: int, report: Report
) -> None:
    """Next-token cross-entropy over the generated tokens. Trains ``model`` in place."""
    model.train()

    def loss_of_step() -> Tensor:
        batch = next(batches)
        logits = model(
            input_ids=torch.cat([batch.ids, batch.target[:, :-1]], 1),
            attention_mask=batch.mask,
            position_ids=batch.positions,
            use_cache=False,
            logits_to_keep=batch.target.shape[1],
        ).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), batch.target.flatten())

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    minimise(loss_of_step, trainable, steps=steps, peak_learning_rate=2.5e-3, warmup=40, report=report)
    model.eval().requires_grad_(False)
