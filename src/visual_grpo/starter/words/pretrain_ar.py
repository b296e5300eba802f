"""Pretrains the small AR module on the words' prompts: every sign has the same tiles."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GlmImageForConditionalGeneration, GlmImageProcessor

from visual_grpo.starter.optimise import Report, minimise
from visual_grpo.starter.pretrain_ar import encode_prompts
from visual_grpo.starter.words.world import WORDS, prompt_of

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

    ``tokens``: [W, T] int64, what is generated for each word: preview, image and end token; ``grids``: (rows,
    columns) of the image and of the preview. Trains ``model`` in place.
    """
    generator = torch.Generator().manual_seed(seed)
    prompts = encode_prompts(model, processor, [prompt_of(word) for word in WORDS], grids, generated=tokens.shape[1])
    model.train()

    def loss_of_step() -> Tensor:
        words = torch.randint(len(WORDS), (_BATCH,), generator=generator)
        logits = model(
            input_ids=torch.cat([prompts["input_ids"][words], tokens[words, :-1]], 1),
            attention_mask=prompts["attention_mask"][words],
            position_ids=prompts["position_ids"][:, words],
            use_cache=False,
            logits_to_keep=tokens.shape[1],
        ).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[words].flatten())

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    minimise(loss_of_step, trainable, steps=steps, peak_learning_rate=2.5e-3, warmup=20, report=report)
    model.eval().requires_grad_(False)
