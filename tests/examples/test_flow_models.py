"""The small flow models and their pretraining."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from torch import Tensor

from examples.edits.pretrain_kontext import pretrain_kontext
from examples.flow_models.models import (
    SMALL_SD3,
    build_sd3_transformer,
    pretrain_flux,
    pretrain_sd3,
    pretrain_z_image,
)
from examples.flow_models.pretrain import misread_row, normalise_latents, pretrain_dit
from examples.flow_models.text_encoders import PROMPT_TOKENS
from visual_grpo.starter.glm_image.modules import build_vae
from visual_grpo.starter.glm_image.pretrain_decoder import to_model_range
from visual_grpo.starter.pretraining import Advance, Job
from visual_grpo.starter.shapes.render import COMBINATIONS, draw_all, instructions

SIDE = 32


@torch.no_grad()
def test_normalised_latents_are_the_vaes_own_and_decode_as_before() -> None:
    images = draw_all(1, SIDE, SIDE, 0).flatten(0, 1)[::9]
    vae = build_vae(SIDE, SIDE, 0)
    pixels = to_model_range(images)
    before = vae.decode(vae.encode(pixels).latent_dist.mode()).sample
    latents = normalise_latents(vae, images)
    encoded = vae.encode(pixels).latent_dist.mode()
    torch.testing.assert_close(latents.mean((0, 2, 3)), torch.zeros(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(latents.std((0, 2, 3)), torch.ones(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(encoded, latents, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(vae.decode(latents).sample, before, atol=1e-4, rtol=1e-4)
    assert vae.config.scaling_factor == 1
    assert vae.config.shift_factor == 0


def test_a_small_kontext_is_saved_that_reads_its_source(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("examples.edits.pretrain_kontext._EDITS", 20)
    job = Job(folder=tmp_path / "base", height=SIDE, width=SIDE, seed=0, task="i2i", steps={"vae": 2, "dit": 3})
    pretrain_kontext(job, lambda module, done: None)
    pipeline = DiffusionPipeline.from_pretrained(job.folder)
    pipeline.set_progress_bar_config(disable=True)
    options = {"height": SIDE, "width": SIDE, "max_area": SIDE**2, "num_inference_steps": 2, "guidance_scale": 1.0}
    images = [
        pipeline(
            source,
            instruction,
            generator=torch.Generator().manual_seed(0),
            max_sequence_length=PROMPT_TOKENS,
            _auto_resize=False,
            output_type="pt",
            **options,
        ).images
        for source, instruction in (
            (Image.new("RGB", (SIDE, SIDE), "red"), "make it blue"),
            (Image.new("RGB", (SIDE, SIDE), "blue"), "make it blue"),
            (Image.new("RGB", (SIDE, SIDE), "red"), "remove the circle"),
        )
    ]
    assert all(image.isfinite().all() for image in images)
    assert not torch.equal(images[0], images[1])
    assert not torch.equal(images[0], images[2])
    assert max(len(pipeline.tokenizer_2(text).input_ids) for text in instructions()) <= PROMPT_TOKENS


def trained(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    dit = build_sd3_transformer(SIDE, seed=2)
    embeds = torch.randn(len(COMBINATIONS) + 1, PROMPT_TOKENS, 64, generator=generator)
    pretrain_dit(
        SMALL_SD3.velocity,
        dit,
        shift=SMALL_SD3.shift,
        latents=torch.randn(len(COMBINATIONS), 2, 4, SIDE // 8, SIDE // 8, generator=generator),
        texts=(embeds, embeds[:, 0]),
        misread=misread_row,
        job=Job(folder=Path("unused"), height=SIDE, width=SIDE, seed=seed, steps={"dit": 3}),
        advance=lambda module, done: None,
    )
    weight: Tensor = dit.proj_out.weight
    return weight


def test_pretraining_is_a_function_of_its_arguments() -> None:
    assert torch.equal(trained(0), trained(0))
    assert not torch.equal(trained(0), trained(1))


@pytest.mark.parametrize(
    ("pretrain", "absent", "tokens"),
    [
        (pretrain_sd3, ("text_encoder_3", "tokenizer_3"), 0),
        pytest.param(pretrain_flux, (), PROMPT_TOKENS, marks=pytest.mark.slow),  # Below, of kontext.
        (pretrain_z_image, (), PROMPT_TOKENS),
    ],
)
def test_a_whole_pipeline_is_saved_that_draws(
    pretrain: Callable[[Job, Advance], None], absent: tuple[str, ...], tokens: int, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("examples.flow_models.pretrain._COPIES", 1)
    reached: list[tuple[str, int]] = []
    job = Job(folder=tmp_path / "base", height=SIDE, width=SIDE, seed=0, steps={"vae": 2, "dit": 2})
    pretrain(job, lambda module, done: reached.append((module, done)))
    assert ("vae", 2) in reached
    assert reached[-2:] == [("dit", 1), ("dit", 2)]
    pipeline = DiffusionPipeline.from_pretrained(job.folder, **dict.fromkeys(absent))
    pipeline.set_progress_bar_config(disable=True)
    prompts = [COMBINATIONS[0].prompt, COMBINATIONS[-1].prompt]
    options = {"num_inference_steps": 2, "guidance_scale": 1.0, "output_type": "pt", "max_sequence_length": tokens}
    generators = [torch.Generator().manual_seed(0) for _ in prompts]
    images = pipeline(prompts, height=SIDE, width=SIDE, generator=generators, **options).images
    assert images.shape == (2, 3, SIDE, SIDE)
    assert images.isfinite().all()
    assert not torch.equal(images[0], images[1])  # the text reaches the transformer
