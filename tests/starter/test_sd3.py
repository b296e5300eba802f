"""The small Stable Diffusion 3 and its pretraining."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor

import visual_grpo.starter.glm_image.modules as glm_modules
from visual_grpo.starter.glm_image.pretrain_decoder import to_model_range
from visual_grpo.starter.pretraining import Job
from visual_grpo.starter.sd3 import PROMPT_TOKENS, build_transformer, normalise_latents, pretrain_dit, pretrain_sd3
from visual_grpo.starter.shapes.draw import COMBINATIONS, draw_all

SIDE = 64


@torch.no_grad()
def test_normalised_latents_are_the_vaes_own_and_decode_as_before() -> None:
    images = draw_all(1, SIDE, SIDE, 0).flatten(0, 1)[::9]
    vae = glm_modules.build_vae(SIDE, SIDE, 0)
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


def trained(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    dit = build_transformer(SIDE, seed=2)
    pretrain_dit(
        dit,
        latents=torch.randn(len(COMBINATIONS), 2, 4, 8, 8, generator=generator),
        embeds=torch.randn(len(COMBINATIONS) + 1, PROMPT_TOKENS, 64, generator=generator),
        pooled=torch.randn(len(COMBINATIONS) + 1, 64, generator=generator),
        job=Job(folder=Path("unused"), height=SIDE, width=SIDE, seed=seed, steps={"dit": 3}),
        advance=lambda module, done: None,
    )
    weight: Tensor = dit.proj_out.weight
    return weight


def test_pretraining_is_a_function_of_its_arguments() -> None:
    assert torch.equal(trained(0), trained(0))
    assert not torch.equal(trained(0), trained(1))


def test_a_whole_pipeline_is_saved_that_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visual_grpo.starter.sd3._COPIES", 1)
    reached: list[tuple[str, int]] = []
    job = Job(folder=tmp_path / "base", height=SIDE, width=SIDE, seed=0, steps={"vae": 2, "dit": 2})
    pretrain_sd3(job, lambda module, done: reached.append((module, done)))
    assert ("vae", 2) in reached
    assert reached[-2:] == [("dit", 1), ("dit", 2)]
    pipeline = StableDiffusion3Pipeline.from_pretrained(job.folder, text_encoder_3=None, tokenizer_3=None)
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(
        COMBINATIONS[0].prompt, num_inference_steps=2, max_sequence_length=0, guidance_scale=1.0, output_type="pt"
    ).images
    assert images.shape == (1, 3, SIDE, SIDE)
    assert images.isfinite().all()
