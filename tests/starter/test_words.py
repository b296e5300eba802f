"""Drawn words, their tokens, and the complete starter with very few steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import GlmImagePipeline
from PIL import Image

from tests.starter.tasks import in_this_process, silent_progress, weights_are_equal
from visual_grpo.config import DataConfig, StarterConfig
from visual_grpo.starter import build
from visual_grpo.starter.build import pretrain_model, render_dataset
from visual_grpo.starter.glm_image.pretrain_on_words import (
    build_corpus,
    no_text_ids,
    pretrain_decoder_half,
    pretrain_language_half,
    text_ids,
)
from visual_grpo.starter.pretraining import Job
from visual_grpo.starter.words import WORDS, draw, prompt_of

HEIGHT, WIDTH, SEED = 32, 96, 3
STEPS = {"vae_steps": 1, "dit_steps": 2, "ar_steps": 1}
DATA = DataConfig(path="unused", height=HEIGHT, width=WIDTH)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> StarterConfig:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("starter")
    config = StarterConfig(
        world="words", dataset=str(folder / "words"), model=str(folder / "base"), records_per_prompt=2, **STEPS
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "run_side_by_side", in_this_process)
        patch.setattr(build, "progress", silent_progress)
        pretrain_model(config, DATA, "glm_image", SEED)
    render_dataset(config, DATA, SEED)
    return config


def test_every_word_has_a_record_that_shows_it(built: StarterConfig) -> None:
    lines = (Path(built.dataset) / "records.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert len({record["id"] for record in records}) == len(records) == 2 * len(WORDS) == 512
    for record in records[::50]:
        word = record["metadata"]["text"]
        assert record["prompt"] == prompt_of(word)
        with Image.open(Path(built.dataset) / record["target_image"]) as image:
            assert image.tobytes() == draw(word, HEIGHT, WIDTH).tobytes()


@pytest.mark.parametrize("size", [(64, 96), (128, 96), (64, 192)])
def test_tokens_identify_tiles_but_not_words(size: tuple[int, int]) -> None:
    corpus, _ = build_corpus(*size, seed=0)
    rows, columns = corpus.image_grid
    image = corpus.generated_tokens()[:, 0, -rows * columns - 1 : -1].unique(dim=0)
    assert image.view(-1, columns).tolist() == [sorted([0, 1, 2] * (columns // 3))] * rows


def test_glyphs_are_read_as_the_pipeline_reads_them(built: StarterConfig) -> None:
    pipeline = GlmImagePipeline.from_pretrained(built.model)
    with torch.no_grad():
        for row in (0, 77):
            expected, without = pipeline.encode_prompt(prompt_of(WORDS[row]))
            torch.testing.assert_close(pipeline.text_encoder(text_ids()[[row]]).last_hidden_state, expected)
            torch.testing.assert_close(pipeline.text_encoder(no_text_ids()).last_hidden_state, without)


def test_the_same_seed_gives_the_same_weights_bit_for_bit(built: StarterConfig, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    steps = {"vae": 1, "dit": 2, "ar": 1}
    job = Job(folder=tmp_path, height=HEIGHT, width=WIDTH, seed=SEED, steps=steps)
    for half in (pretrain_decoder_half, pretrain_language_half):
        half(job, lambda module, done: None)
    assert weights_are_equal(tmp_path, Path(built.model)) == [True] * 4
