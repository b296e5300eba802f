"""Training batches of the small AR module on drawn words. All signs have the same tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import GlmImageForConditionalGeneration, GlmImageProcessor

from visual_grpo.starter.glm_image.ar_batches import ArBatch, encode_texts
from visual_grpo.starter.glm_image.corpus import Grid
from visual_grpo.starter.words.world import WORDS, prompt_of

_BATCH = 48


def word_batches(
    model: GlmImageForConditionalGeneration,
    processor: GlmImageProcessor,
    tokens: Tensor,
    *,
    grids: list[Grid],
    seed: int,
) -> Iterator[ArBatch]:
    """Infinite batches of prompts.

    ``tokens``: [W, T] int64, the tokens to generate for each word: preview, image and end token; ``grids``: (rows,
    columns) of the image and of the preview.
    """
    generator = torch.Generator().manual_seed(seed)
    texts = [prompt_of(word) for word in WORDS]
    encoded = encode_texts(model, processor, texts, sources=[], targets=grids, generated=tokens.shape[1])
    while True:
        words = torch.randint(len(WORDS), (_BATCH,), generator=generator)
        yield encoded.batch(words.tolist(), encoded.ids[words], tokens[words])
