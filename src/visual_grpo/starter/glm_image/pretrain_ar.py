"""Pretrains the small AR module on prompts or edits, with the image tokens of a deliberately flawed policy."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GlmImageForConditionalGeneration, GlmImageProcessor

from visual_grpo.starter.glm_image import modules
from visual_grpo.starter.glm_image.codebook import IMAGE_END, IMAGE_START, build_processor, image_token
from visual_grpo.starter.glm_image.corpus import Corpus, Grid, SceneBank, build_corpus
from visual_grpo.starter.pretraining import Advance, Job, minimise
from visual_grpo.starter.shapes.dataset import misread, misread_edit
from visual_grpo.starter.shapes.render import COMBINATIONS, EDITS, instructions, random_edit

_BATCH = 48


@dataclass(frozen=True, kw_only=True)
class EncodedTexts:
    """B texts as L prompt tokens, left-padded, followed by T generated ones."""

    ids: Tensor
    """[B, L] int64."""
    mask: Tensor
    """[B, L + T - 1] int64 attention mask of prompt and generated tokens."""
    positions: Tensor
    """[3, B, L + T - 1] int64."""

    def batch(self, rows: list[int], ids: Tensor, target: Tensor) -> ArBatch:
        return ArBatch(ids=ids, mask=self.mask[rows], positions=self.positions[:, rows], target=target)


@dataclass(frozen=True, kw_only=True)
class ArBatch(EncodedTexts):
    target: Tensor
    """[B, T] int64: the tokens to generate."""


def prompt_batches(
    model: GlmImageForConditionalGeneration, processor: GlmImageProcessor, corpus: Corpus, *, seed: int
) -> Iterator[ArBatch]:
    """Endless; each prompt with one of the pictures of what it is misread as."""
    rng = random.Random(seed)
    rank = {combination: i for i, combination in enumerate(COMBINATIONS)}
    tokens = corpus.generated_tokens()
    copies, generated = tokens.shape[1:]
    texts = [combination.prompt for combination in COMBINATIONS]
    grids = [corpus.image_grid, corpus.preview_grid]
    encoded = encode_texts(model, processor, texts, sources=[], targets=grids, generated=generated)
    while True:
        asked = [rng.randrange(len(COMBINATIONS)) for _ in range(_BATCH)]
        drawn = [rank[misread(COMBINATIONS[i], rng)] for i in asked]
        yield encoded.batch(asked, encoded.ids[asked], tokens[drawn, [rng.randrange(copies) for _ in drawn]])


def edit_batches(
    model: GlmImageForConditionalGeneration, processor: GlmImageProcessor, bank: SceneBank, *, seed: int
) -> Iterator[ArBatch]:
    """Endless; the tokens of the source precede the instruction, and there is no preview."""
    rng = random.Random(seed)
    texts = instructions()
    rank = {text: i for i, text in enumerate(texts)}
    generated = bank.grid[0] * bank.grid[1] + 1
    encoded = encode_texts(model, processor, texts, sources=[bank.grid], targets=[bank.grid], generated=generated)
    while True:
        edits = [random_edit(rng.choice(EDITS), rng.choice(COMBINATIONS), rng) for _ in range(_BATCH)]
        jitters = [(rng.randrange(len(bank.jitters)), rng.randrange(len(bank.jitters))) for _ in edits]
        source = bank.tokens([(edit.before, edit.other) for edit in edits], jitters)
        target = bank.tokens([misread_edit(edit, rng) for edit in edits], jitters)
        asked = [rank[edit.instruction] for edit in edits]
        ids = encoded.ids[asked]
        ids[ids == processor.image_token_id] = source.flatten()
        yield encoded.batch(asked, ids, torch.cat([target, torch.full((len(edits), 1), IMAGE_END)], 1))


def encode_texts(
    model: GlmImageForConditionalGeneration,
    processor: GlmImageProcessor,
    texts: Sequence[str],
    *,
    sources: list[Grid],
    targets: list[Grid],
    generated: int,
) -> EncodedTexts:
    """Encodes texts in the processor's format, with a placeholder for every source token."""
    before = "".join(
        image_token(IMAGE_START) + processor.image_token * (rows * columns) + image_token(IMAGE_END)
        for rows, columns in sources
    )
    after = "".join(f"<sop>{rows} {columns}<eop>" for rows, columns in targets) + processor.tokenizer.bos_token
    encoded = processor.tokenizer([before + text + after for text in texts], padding=True, return_tensors="pt")
    ids, mask = encoded["input_ids"], encoded["attention_mask"]
    grids = [*sources, *targets]
    count = len(texts)
    thw = torch.tensor([[1, *grid] for grid in grids]).repeat(count, 1)
    prompt_positions, _ = model.model.get_rope_index(
        ids, image_grid_thw=thw, images_per_sample=torch.full((count,), len(grids)), attention_mask=mask
    )
    generated_positions = model.model._cached_decode_position_ids.permute(1, 0, 2)[:, :, : generated - 1]
    model.model._cached_decode_position_ids = model.model.rope_deltas = model.model._prefill_len = None
    return EncodedTexts(
        ids=ids,
        mask=torch.cat([mask, torch.ones(count, generated - 1, dtype=mask.dtype)], 1),
        positions=torch.cat([prompt_positions, generated_positions], -1),
    )


def pretrain_ar(
    model: GlmImageForConditionalGeneration, batches: Iterator[ArBatch], job: Job, advance: Advance
) -> None:
    """Trains ``model`` by next-token cross-entropy over the generated tokens; saves ``vision_language_encoder``."""
    model.train()

    def backward() -> None:
        batch = next(batches)
        logits = model(
            input_ids=torch.cat([batch.ids, batch.target[:, :-1]], 1),
            attention_mask=batch.mask,
            position_ids=batch.positions,
            use_cache=False,
            logits_to_keep=batch.target.shape[1],
        ).logits
        F.cross_entropy(logits.flatten(0, 1).float(), batch.target.flatten()).backward()

    weights = [weight for weight in model.parameters() if weight.requires_grad]
    minimise(backward, weights, job, "ar", advance, peak_learning_rate=2.5e-3, warmup=40)
    model.eval().requires_grad_(False).save_pretrained(job.folder / "vision_language_encoder")


def pretrain_language_half(job: Job, advance: Advance) -> None:
    corpus, processor = build_corpus(job.height, job.width, job.seed), build_processor(job.task)
    model = modules.build_ar(processor, corpus.codebook, job.seed)
    kinds = []
    if job.task != "i2i":
        kinds.append(prompt_batches(model, processor, corpus, seed=job.seed))
    if job.task != "t2i":
        bank = SceneBank(corpus.codebook, job.height, job.width, job.seed)
        kinds.append(edit_batches(model, processor, bank, seed=job.seed))
    # Alternately: prompts and edits have different lengths and cannot share a batch.
    pretrain_ar(model, chain.from_iterable(zip(*kinds, strict=True)), job, advance)
