"""Signs with words, and the complete starter with very few steps."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from PIL import Image
from torch.nn.functional import max_pool2d

from examples.words import pretrain_sd3
from examples.words.pretrain_sd3 import pretrain_signs, sign_tokenizer
from examples.words.signs import FACES, LENGTHS, SIZES, WORDS, LettersApart, draw, prompt_of
from tests.starter.tasks import in_this_process, silent_progress, weights_are_equal
from visual_grpo.common.images import to_tensor
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import DataConfig, StarterConfig
from visual_grpo.starter import build
from visual_grpo.starter.build import pretrain_model, render_dataset
from visual_grpo.starter.pretraining import Job

HEIGHT, WIDTH, SEED = 64, 256, 3
DATA = DataConfig(path="unused", height=HEIGHT, width=WIDTH)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> StarterConfig:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("starter")
    places = {"dataset": str(folder / "words"), "model": str(folder / "base")}
    config = StarterConfig(
        world="examples.words:WORLD", records_per_prompt=2, vae_steps=1, dit_steps=2, ar_steps=1, **places
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "run_side_by_side", in_this_process)
        patch.setattr(build, "progress", silent_progress)
        patch.setattr(pretrain_sd3, "_SIGNS", 40)
        pretrain_model(config, DATA, "sd3", SEED)
    render_dataset(config, DATA, SEED)
    return config


def test_words_differ_and_have_four_to_eight_letters() -> None:
    assert len(set(WORDS)) == len(WORDS) > 200
    assert {len(word) for word in WORDS} == set(LENGTHS) == {4, 5, 6, 7, 8}


@pytest.mark.parametrize("face", [FACES[0], *(pytest.param(face, marks=pytest.mark.slow) for face in FACES[1:])])
def test_drawn_letters_stand_apart_until_they_are_too_large_or_too_bold(face: str) -> None:
    def apart(size: float, bolder: int = 1) -> float:
        signs = [to_tensor(draw(word, HEIGHT, WIDTH, face, size)).float() for word in WORDS[::16]]
        signs = [max_pool2d(sign, bolder, stride=1, padding=bolder // 2) for sign in signs]
        records = [PromptRecord(id=word, prompt="", metadata={"text": word}) for word in WORDS[::16]]
        return float(LettersApart()(records, signs).mean())

    assert apart(SIZES[0]) == 1
    assert apart(SIZES[1]) > 0.9
    assert apart(SIZES[1], bolder=15) < 0.8
    assert apart(2 * SIZES[1]) < 0.5


@pytest.mark.parametrize("seed", range(4))
def test_the_base_model_has_not_seen_the_words(seed: int) -> None:
    texts = pretrain_sd3.random_texts(random.Random(seed))
    assert len(texts) == 3072
    assert not set(texts) & set(WORDS)


def test_every_word_has_a_record_that_shows_it(built: StarterConfig) -> None:
    lines = (Path(built.dataset) / "records.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert len({record["id"] for record in records}) == len(records) == 2 * len(WORDS)
    for record in records[::50]:
        word = record["metadata"]["text"]
        assert record["prompt"] == prompt_of(word)
        with Image.open(Path(built.dataset) / record["target_image"]) as image:
            assert image.tobytes() == draw(word, HEIGHT, WIDTH).tobytes()


def test_fonts_and_sizes_differ() -> None:
    drawn = {draw("HOTEL", HEIGHT, WIDTH, face, size).tobytes() for face in FACES for size in SIZES}
    assert len(drawn) == len(FACES) * len(SIZES)


def test_every_letter_is_a_token_and_no_prompt_is_cut() -> None:
    tokenizer = sign_tokenizer()
    for word in WORDS:
        assert tokenizer.tokenize(prompt_of(word))[-len(word) - 1 : -1] == list(word)
        assert len(tokenizer(prompt_of(word)).input_ids) <= tokenizer.model_max_length


def test_a_saved_pipeline_draws_signs(built: StarterConfig) -> None:
    pipeline = StableDiffusion3Pipeline.from_pretrained(built.model, text_encoder_3=None, tokenizer_3=None)
    options = {"height": HEIGHT, "width": WIDTH, "num_inference_steps": 1, "max_sequence_length": 0}
    assert pipeline(prompt_of("HOTEL"), **options).images[0].size == (WIDTH, HEIGHT)


def test_the_same_seed_gives_the_same_weights_bit_for_bit(
    built: StarterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(pretrain_sd3, "_SIGNS", 40)
    job = Job(folder=tmp_path, height=HEIGHT, width=WIDTH, seed=SEED, steps={"vae": 1, "dit": 2})
    pretrain_signs(job, lambda module, done: None)
    assert set(weights_are_equal(tmp_path, Path(built.model))) == {True}
