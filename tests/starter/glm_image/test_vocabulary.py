"""Tokenizer, codebook, and the vision tower that agrees with the codebook."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from torch import Tensor

from visual_grpo.starter.glm_image import modules
from visual_grpo.starter.glm_image.codebook import (
    CODEBOOK_SIZE,
    FEATURES,
    IMAGE_END,
    build_processor,
    build_tokenizer,
    nearest_codes,
    patch_features,
)
from visual_grpo.starter.glm_image.corpus import Corpus, build_corpus


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return build_corpus(128, 128, seed=0)


def pixels_of(corpus: Corpus) -> Tensor:
    return corpus.images[:, 0].float() / 255


@pytest.mark.parametrize(
    "text", ["a small red circle on the left", "一只红色的猫在左边", "🎉 Ünïcode \t\n", "\u200fعربي 0123456789"]
)
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert min(ids) > IMAGE_END, "text must not become image tokens"


def test_codes_carry_the_picture(corpus: Corpus) -> None:
    pixels = pixels_of(corpus)
    features = patch_features(pixels, corpus.image_grid)
    coded = corpus.codebook[nearest_codes(pixels, corpus.image_grid, corpus.codebook)]
    assert corpus.codebook.shape == (CODEBOOK_SIZE, FEATURES)
    assert (coded - features).abs().mean() < 0.01
    assert features.var(0).mean() > 0.01


def test_the_vision_tower_gives_the_nearest_codes(corpus: Corpus) -> None:
    processor = build_processor()
    model = modules.build_ar(processor, corpus.codebook, seed=0)
    images = [Image.fromarray(picture.permute(1, 2, 0).numpy()) for picture in corpus.images[:, 0]]
    inputs = processor.image_processor(images, return_tensors="pt")
    with torch.no_grad():
        features = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
        tokens = model.model.get_image_tokens(features, inputs["image_grid_thw"]).view(len(images), -1)
    nearest = nearest_codes(pixels_of(corpus), corpus.image_grid, corpus.codebook)
    assert tokens.unique().numel() > 80
    assert (tokens == nearest).float().mean() > 0.995


def test_tokens_for_the_two_modules(corpus: Corpus) -> None:
    generated, upsampled = corpus.generated_tokens(), corpus.upsampled_tokens(corpus.images.flatten(0, 1))
    assert generated.shape == (150, 10, 2 * 2 + 4 * 4 + 1)
    assert (generated[..., -1] == IMAGE_END).all()
    image = generated[0, 0, 4:20].view(4, 4)
    assert torch.equal(upsampled[0].view(8, 8)[::2, 1::2], image)
    assert torch.equal(upsampled[0].view(8, 8)[1::2, ::2], image)
