"""The training batches of the AR module."""

from __future__ import annotations

import random

import pytest
import torch
from PIL import Image
from transformers import GlmImageForConditionalGeneration, GlmImageProcessor

from visual_grpo.starter.glm_image import modules
from visual_grpo.starter.glm_image.codebook import IMAGE_END, build_processor, fit_codebook, nearest_codes
from visual_grpo.starter.glm_image.corpus import SceneBank
from visual_grpo.starter.glm_image.pretrain_ar import ArBatch, edit_batches
from visual_grpo.starter.shapes.render import COMBINATIONS, EDITS, draw_all, draw_scene, random_edit, stacked

HEIGHT, WIDTH, GRID = 64, 96, (2, 3)


@pytest.fixture(scope="module")
def bank() -> SceneBank:
    pictures = draw_all(1, HEIGHT, WIDTH, seed=0).flatten(0, 1).float() / 255
    return SceneBank(fit_codebook(pictures, [GRID], seed=0), HEIGHT, WIDTH, seed=0)


@pytest.fixture(scope="module")
def processor() -> GlmImageProcessor:
    return build_processor("i2i")


@pytest.fixture(scope="module")
def model(processor: GlmImageProcessor, bank: SceneBank) -> GlmImageForConditionalGeneration:
    return modules.build_ar(processor, bank.codebook, seed=0)


def test_the_bank_knows_the_tokens_of_every_scene(bank: SceneBank) -> None:
    rng = random.Random(1)
    for kind in EDITS:
        for edit in (random_edit(kind, rng.choice(COMBINATIONS), rng) for _ in range(8)):
            numbers = (rng.randrange(10), rng.randrange(10))
            things = zip((edit.before, edit.other), numbers, strict=True)
            scene = [(thing, bank.jitters[number]) for thing, number in things if thing]
            drawn = stacked([draw_scene(scene, HEIGHT, WIDTH)]).float() / 255
            expected = nearest_codes(drawn, GRID, bank.codebook)
            assert (bank.tokens([(edit.before, edit.other)], [numbers]) == expected).float().mean() > 0.95


def test_an_edit_is_formatted_as_the_processor_does(
    model: GlmImageForConditionalGeneration, processor: GlmImageProcessor, bank: SceneBank
) -> None:
    """Compares ids, mask and positions; the processor's placeholders are replaced by the source's tokens."""
    batch = next(edit_batches(model, processor, bank, seed=0))
    texts = [text_of(processor, batch, row) for row in range(6)]
    blank = Image.new("RGB", (WIDTH, HEIGHT))
    messages = [
        [{"role": "user", "content": [{"type": "image", "image": blank}, {"type": "text", "text": text}]}]
        for text in texts
    ]
    options = {"padding": "max_length", "max_length": batch.ids.shape[1], "padding_side": "left"}
    stock = processor.apply_chat_template(
        messages,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={**options, "target_h": HEIGHT, "target_w": WIDTH},
    )
    placeholder = stock["input_ids"] == processor.image_token_id
    assert placeholder.sum(1).tolist() == [6] * 6
    assert torch.equal(batch.ids[:6].masked_fill(placeholder, processor.image_token_id), stock["input_ids"])
    prompt, generated = batch.ids.shape[1], batch.target.shape[1]
    assert generated == 7
    assert (batch.target[:, -1] == IMAGE_END).all()
    assert torch.equal(batch.mask[:6, :prompt], stock["attention_mask"])
    inner = model.model
    positions, _ = inner.get_rope_index(
        stock["input_ids"], stock["image_grid_thw"], stock["images_per_sample"], stock["attention_mask"]
    )
    assert torch.equal(batch.positions[:, :6, :prompt], positions)
    during = inner._cached_decode_position_ids.permute(1, 0, 2)[:, :, : generated - 1]
    inner._cached_decode_position_ids = inner.rope_deltas = inner._prefill_len = None
    assert torch.equal(batch.positions[:, :6, prompt:], during)


def text_of(processor: GlmImageProcessor, batch: ArBatch, row: int) -> str:
    ids = batch.ids[row][batch.mask[row, : batch.ids.shape[1]] == 1][8:]  # 6 tokens of the source, start and end
    return str(processor.tokenizer.decode(ids)).split("<sop>")[0]
