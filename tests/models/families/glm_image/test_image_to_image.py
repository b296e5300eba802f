"""Records with one or two source images, through sampling, replay and generation of both modules."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import GlmImagePipeline
from PIL import Image

from tests.conftest import SIZE, stir
from tests.models.families.glm_image.test_dit import ROLLOUT, TWO_STEPS, model_with, policy_with
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import PolicyConfig, SamplerConfig
from visual_grpo.models.family_check import replay_error
from visual_grpo.models.rows import START_NOISE
from visual_grpo.training.components import load_model, load_policy

TEXTS = ["make it red", "move the small yellow square on the left to the bottom, please", "去掉 “圆”"]
EVAL_SAMPLER = SamplerConfig(steps=3, guidance_scale=1.5)
BOTH = pytest.mark.parametrize(
    ("count", "mode"), [pytest.param(1, {}, marks=pytest.mark.slow), (2, {"gradient_checkpointing": True})]
)
"""Source images, with and without checkpointing."""


def edits(sources: list[Path], count: int) -> list[PromptRecord]:
    return [
        PromptRecord(id=str(i), prompt=text, source_images=tuple(sources[i * count : (i + 1) * count]))
        for i, text in enumerate(TEXTS)
    ]


@BOTH
def test_the_tokens_replay_gives_the_samplers_log_probs_back(
    pipeline_folder: Path, source_images: list[Path], count: int, mode: dict[str, Any]
) -> None:
    """Batch of three prompt lengths, left-padded, with an adapter that has an effect."""
    policy = load_policy(str(pipeline_folder), size=SIZE, policy=PolicyConfig(**mode), kl_reference=True, device="cpu")
    stir(policy)
    records = edits(source_images, count)
    got = policy.rollout(records, 2, torch.Generator().manual_seed(3))
    (chunk,) = policy.replay(got.trajectory, torch.arange(6))
    assert got.log_probs.shape == (6, 2 * 3)
    torch.testing.assert_close(chunk.log_probs, got.log_probs, rtol=0, atol=5e-5)


def test_tokens_are_those_of_generate(pipeline_folder: Path, source_images: list[Path]) -> None:
    """The model's own ``generate``, which encodes the pixels itself."""
    image = model_with(pipeline_folder)
    records = edits(source_images, 2)
    greedy = SamplerConfig(temperature=1.0, top_p=1.0, top_k=1, steps=1, guidance_scale=1.0)
    trajectory = image.sample_tokens(records, [1, 2, 3], greedy).trajectory
    tokens = image.tokens(EVAL_SAMPLER)
    inputs = tokens.processed(records)
    assert "pixel_values" in inputs
    generated = tokens.network.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert torch.equal(generated[:, inputs["input_ids"].shape[1] :], trajectory.tokens)


@BOTH
def test_the_denoisings_replay_gives_the_samplers_log_probs_back(
    pipeline_folder: Path, source_images: list[Path], count: int, mode: dict[str, Any]
) -> None:
    policy = policy_with(pipeline_folder, flow=TWO_STEPS, **mode)
    assert replay_error(policy, edits(source_images, count)) < 1e-6


def test_the_decoded_image_is_the_pipelines_own(pipeline_folder: Path, source_images: list[Path]) -> None:
    """Given our tokens, the plain pipeline's own call with the source images."""
    image = model_with(pipeline_folder)
    records = edits(source_images, 2)
    for row, record in enumerate(records):
        got = image.generate([record], [11 + row], EVAL_SAMPLER)[0]
        conditions = image.decoder(EVAL_SAMPLER).conditions([record], [11 + row], 1.5)
        plain = GlmImagePipeline.from_pretrained(pipeline_folder)
        plain.set_progress_bar_config(disable=True)
        noise = torch.randn(
            1, 4, SIZE[0] // 8, SIZE[1] // 8, generator=torch.Generator().manual_seed((11 + row) ^ START_NOISE)
        )
        want = plain(
            prompt=record.prompt,
            image=[[Image.open(path) for path in record.source_images]],
            prior_token_ids=conditions.tokens,
            prior_token_image_ids=[torch.cat([tokens[0] for tokens in conditions.source_tokens])],
            source_image_grid_thw=[torch.tensor([[1, SIZE[0] // 16, SIZE[1] // 16]] * 2)],
            latents=noise,
            height=SIZE[0],
            width=SIZE[1],
            num_inference_steps=EVAL_SAMPLER.steps,
            guidance_scale=EVAL_SAMPLER.guidance_scale,
            output_type="np",
        ).images[0]
        difference = got.permute(1, 2, 0).float() - torch.from_numpy(want) * 255
        assert difference.abs().max() < 0.6  # rounding to 8 bits


def test_kinds_mix_in_generation_and_not_in_a_batch(pipeline_folder: Path, source_images: list[Path]) -> None:
    image = model_with(pipeline_folder, train=["ar"])
    plain = PromptRecord(id="t2i", prompt="a red circle")
    mixed = [edits(source_images, 1)[0], plain, edits(source_images, 2)[1], edits(source_images, 1)[2]]
    together = image.generate(mixed, [1, 2, 3, 4], EVAL_SAMPLER)
    for row, record in enumerate(mixed):
        alone = image.generate([record], [row + 1], EVAL_SAMPLER)[0]
        assert (together[row].int() - alone.int()).abs().max() <= 1
    with pytest.raises(UserError, match="'0' and 't2i' of one batch have 1 and 0 source images"):
        image.sample_tokens(mixed[:2], [1, 2], ROLLOUT)


def test_a_source_that_is_written_again_is_read_again(
    pipeline_folder: Path, source_images: list[Path], tmp_path: Path
) -> None:
    model = load_model(str(pipeline_folder), size=SIZE, device="cpu")
    pictures = []
    for source in source_images[:2]:
        shutil.copyfile(source, tmp_path / "edit.png")
        record = PromptRecord(id="a", prompt="make it red", source_images=(tmp_path / "edit.png",))
        pictures += model.generate([record], [0], EVAL_SAMPLER)
    assert not torch.equal(*pictures)
