"""What the small VAE is shown while it is pretrained."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import visual_grpo.starter.modules as modules
from visual_grpo.starter.pretrain_vae import encode_normalised, pretrain_vae

HEIGHT, WIDTH = 96, 128


@pytest.mark.parametrize(("whole_share", "whole"), [(0.4, 2), (0.0, 0), (1.0, 5)])
def test_the_last_steps_see_whole_images(whole_share: float, whole: int) -> None:
    vae = modules.build_vae(HEIGHT, WIDTH, 0)
    shown: list[tuple[int, ...]] = []
    vae.encoder.register_forward_hook(lambda module, given, _: shown.append(tuple(given[0].shape)))
    images = torch.randint(256, (4, 3, HEIGHT, WIDTH), dtype=torch.uint8)
    pretrain_vae(vae, images, steps=5, whole_share=whole_share, seed=0, report=lambda done: None)
    assert shown == [(8, 3, 64, 64)] * (5 - whole) + [(3, 3, HEIGHT, WIDTH)] * whole


def test_crops_start_where_a_latent_does(monkeypatch: pytest.MonkeyPatch) -> None:
    vae = modules.build_vae(HEIGHT, WIDTH, 0)
    crops: list[Any] = []
    vae.encoder.register_forward_hook(lambda module, given, _: crops.append(given[0][:, :, 0, 0]))
    # Each pixel says where it is: its row in the first channel, its column in the second.
    rows, columns = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")
    images = torch.stack([rows, columns, rows]).to(torch.uint8)[None]
    pretrain_vae(vae, images, steps=4, whole_share=0.0, seed=0, report=lambda done: None)
    corners = ((torch.cat(crops)[:, :2] + 1) * 127.5).round().long()
    assert (corners % 8 == 0).all()
    assert corners[:, 0].unique().tolist() == list(range(0, HEIGHT - 64 + 1, 8))
    assert set(corners[:, 1].tolist()) <= set(range(0, WIDTH - 64 + 1, 8))


def test_latents_are_normalised_channel_by_channel_and_the_configuration_knows_how() -> None:
    vae = modules.build_vae(HEIGHT, WIDTH, 0)
    images = torch.randint(256, (40, 3, HEIGHT, WIDTH), dtype=torch.uint8)
    latents = encode_normalised(vae, images)
    assert latents.shape == (40, modules.LATENT_CHANNELS, HEIGHT // 8, WIDTH // 8)
    torch.testing.assert_close(latents.mean((0, 2, 3)), torch.zeros(modules.LATENT_CHANNELS), atol=1e-4, rtol=0)
    torch.testing.assert_close(latents.std((0, 2, 3)), torch.ones(modules.LATENT_CHANNELS), atol=1e-4, rtol=0)
    pixels = images[:1].float() / 127.5 - 1
    with torch.no_grad():
        raw = vae.encode(pixels).latent_dist.mode()
    mean, std = (torch.tensor(v)[:, None, None] for v in (vae.config.latents_mean, vae.config.latents_std))
    torch.testing.assert_close(latents[:1], (raw - mean) / std, atol=1e-4, rtol=1e-4)
