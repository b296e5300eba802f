"""What is LTX-Video's own: frame counts, positions in seconds, and the models that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel

from tests.models.families.ltx import tiny
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import ModelConfig, PolicyConfig
from visual_grpo.models.families.ltx import FAMILY, Ltx, LtxOptions
from visual_grpo.models.family import find_family
from visual_grpo.models.family_check import check_family
from visual_grpo.models.module import ModelSettings
from visual_grpo.training.components import load_model

CPU = ModelConfig(path="unused", device="cpu")


def ltx(size: tuple[int, int] = (64, 96), frames: int = tiny.FRAMES, fps: float = 24.0) -> Ltx:
    settings = ModelSettings(size=size, frames=frames, fps=fps, policy=PolicyConfig(), options=LtxOptions())
    return Ltx(tiny.pipeline(), settings)


@pytest.mark.parametrize(("frames", "latent_frames"), [(9, 2), (17, 3), (33, 5)])
def test_videos_have_the_frames_that_were_asked_for(frames: int, latent_frames: int) -> None:
    model = ltx(frames=frames)
    assert model.latent_shape == (8, latent_frames, 2, 3)
    [video] = model.pixels(torch.randn(1, *model.latent_shape))
    assert (video.frames.shape, video.frames.dtype, video.fps) == ((frames, 3, 64, 96), torch.uint8, 24.0)


@pytest.mark.parametrize("frames", [None, 1, 5, 8, 12, 265])
def test_another_number_of_frames_is_refused(frames: int | None, tmp_path: Path) -> None:
    told = rf"data.frames is {'null' if frames is None else frames}; ltx generates videos of 9, 17, 25, \.\.\. or 257"
    with pytest.raises(UserError, match=told):
        FAMILY.check_frames(frames)
    tiny.pipeline().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=told):
        load_model(str(tmp_path), size=(64, 96), frames=frames, device="cpu")


def test_it_draws_as_its_pipeline_does_at_another_size_and_length(tmp_path: Path) -> None:
    tiny.pipeline().save_pretrained(tmp_path)
    findings = check_family(FAMILY, str(tmp_path), CPU, (128, 64), LtxOptions(), 3.0, 9)
    assert {finding.name: finding.difference for finding in findings if finding.difference > 1e-6} == {}


def test_frames_per_second_are_where_a_frame_stands_in_time() -> None:
    records, entries, velocities = [PromptRecord(id="a", prompt="a cat")], torch.zeros(1, dtype=torch.int64), []
    for model in (ltx(fps=8.0), ltx(fps=24.0)):
        state = torch.linspace(-1, 1, 8 * 3 * 2 * 3).view(1, *model.latent_shape)
        with torch.no_grad():
            velocities.append(model.velocity(model.conditions(records, [0], 1.0), entries)(state, 500.0))
    slow, fast = velocities
    assert (slow - fast).abs().max() > 1e-3 * slow.abs().max()


def test_ltx_2_is_refused(tmp_path: Path) -> None:
    pipeline, heads = tiny.pipeline(), {"num_attention_heads": 2, "audio_num_attention_heads": 2}
    widths = {"attention_head_dim": 16, "audio_attention_head_dim": 16, "cross_attention_dim": 32}
    small = LTX2VideoTransformer3DModel(in_channels=8, num_layers=1, caption_channels=64, **heads, **widths)
    pipeline.register_modules(transformer=small)
    refused(pipeline, tmp_path)


def test_a_vae_that_draws_noise_is_refused(tmp_path: Path) -> None:
    refused(tiny.pipeline(timestep_conditioning=True), tmp_path)


def refused(pipeline: Any, folder: Path) -> None:
    pipeline.save_pretrained(folder)
    with pytest.raises(UserError, match=r"is not LTX-Video 0\.9\.0 \(Lightricks/LTX-Video\), which the family ltx"):
        find_family("auto", str(folder)).load(str(folder), CPU)
