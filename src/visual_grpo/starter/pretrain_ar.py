"""Pretrains the small AR module on prompts and the tokens of what a weak policy draws for them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GlmImageForConditionalGeneration, GlmImageProcessor

from visual_grpo.shapes_world import COMBINATIONS
from visual_grpo.starter.misreadings import misread
from visual_grpo.starter.optimise import Report, minimise

_BATCH = 48


def pretrain_ar(
    model: GlmImageForConditionalGeneration,
    processor: GlmImageProcessor,
    tokens: Tensor,
    *,
    grids: list[tuple[int, int]],
    steps: int,
    seed: int,
    report: Report,
) -> None:
    """Next-token cross-entropy over the image tokens.

    ``tokens``: [combinations, K, T] int64, what is generated for K pictures of each combination: preview, image
    and end token; ``grids``: (rows, columns) of the image and of the preview. Trains ``model`` in place.
    """
    rng = random.Random(seed)
    rank = {combination: i for i, combination in enumerate(COMBINATIONS)}
    asked_for = [combination.prompt for combination in COMBINATIONS]
    prompts = encode_prompts(model, processor, asked_for, grids, generated=tokens.shape[2])
    model.train()

    def loss_of_step() -> Tensor:
        asked = [rng.randrange(len(COMBINATIONS)) for _ in range(_BATCH)]
        drawn = [rank[misread(COMBINATIONS[i], rng)] for i in asked]
        target = tokens[drawn, [rng.randrange(tokens.shape[1]) for _ in drawn]]
        logits = model(
            input_ids=torch.cat([prompts["input_ids"][asked], target[:, :-1]], 1),
            attention_mask=prompts["attention_mask"][asked],
            position_ids=prompts["position_ids"][:, asked],
            use_cache=False,
            logits_to_keep=target.shape[1],
        ).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    minimise(loss_of_step, trainable, steps=steps, peak_learning_rate=2.5e-3, warmup=40, report=report)
    model.eval().requires_grad_(False)


def encode_prompts(
    model: GlmImageForConditionalGeneration,
    processor: GlmImageProcessor,
    prompts: Sequence[str],
    grids: list[tuple[int, int]],
    generated: int,
) -> dict[str, Tensor]:
    """Every prompt once: ids [C, L], left padded; mask and position ids [.., L + generated - 1]."""
    suffix = "".join(f"<sop>{rows} {columns}<eop>" for rows, columns in grids) + processor.tokenizer.bos_token
    encoded = processor.tokenizer([prompt + suffix for prompt in prompts], padding=True, return_tensors="pt")
    ids, mask = encoded["input_ids"], encoded["attention_mask"]
    count = len(prompts)
    thw = torch.tensor([[1, *grid] for grid in grids]).repeat(count, 1)
    before, _ = model.model.get_rope_index(
        ids, image_grid_thw=thw, images_per_sample=torch.full((count,), len(grids)), attention_mask=mask
    )
    during = model.model._cached_decode_position_ids.permute(1, 0, 2)[:, :, : generated - 1]
    model.model._cached_decode_position_ids = model.model.rope_deltas = model.model._prefill_len = None
    return {
        "input_ids": ids,
        "attention_mask": torch.cat([mask, torch.ones(count, generated - 1, dtype=mask.dtype)], 1),
        "position_ids": torch.cat([before, during], -1),
    }
