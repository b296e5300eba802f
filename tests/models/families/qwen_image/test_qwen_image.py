from __future__ import annotations

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from tests.models import flow_checks
from tests.models.families.qwen_image import tiny
from tests.training.few_steps import parameters
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import ModelConfig
from visual_grpo.models.families import qwen_image_edit
from visual_grpo.models.families.qwen_image import FAMILY, QwenImage, QwenImageOptions
from visual_grpo.models.families.qwen_image_edit import QwenImageEdit
from visual_grpo.models.family import find_family
from visual_grpo.models.run_spec import resolve

CPU = ModelConfig(path="unused", device="cpu")


@pytest.fixture
def pipeline() -> Any:
    return tiny.pipeline()


@pytest.fixture
def edit_pipeline(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its sources are 64 x 128 pixels instead of a million."""
    import diffusers.pipelines.qwenimage.pipeline_qwenimage_edit as module

    monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio: (128, 64, None))
    return tiny.pipeline(edit=True)


def stock(pipeline: Any, records: Sequence[PromptRecord], noise: torch.Tensor, scale: float, **more: Any) -> Any:
    """Latents [b, C, h, w] of the pipeline, or its images; the source of a batch as one list, of one record as one."""
    if records[0].source_images:
        size = {"height": 64, "width": 128}
        images = [pipeline.image_processor.resize(tiny.opened(record), **size) for record in records]
        more["image"] = images if len(images) > 1 else tiny.opened(records[0])
    if scale > 1:
        more.setdefault("negative_prompt", [" "] * len(records))
    given = pipeline(
        prompt=[record.prompt for record in records],
        latents=pixel_unshuffle(noise, 2).flatten(2).transpose(1, 2),
        height=tiny.SIZE[0],
        width=tiny.SIZE[1],
        num_inference_steps=flow_checks.STEPS,
        true_cfg_scale=scale,
        **{"output_type": "latent", **more},
    ).images
    if isinstance(given, torch.Tensor):
        return pixel_shuffle(given.transpose(1, 2).unflatten(2, (tiny.SIZE[0] // 16, -1)), 2)
    return given


@pytest.mark.parametrize("scale", [pytest.param(1.0, marks=pytest.mark.slow), 4.0])
def test_a_batch_of_edits_draws_as_the_pipelines_batch_does(
    edit_pipeline: Any, source_images: list[Path], scale: float
) -> None:
    model, records = QwenImageEdit(edit_pipeline, tiny.SIZE, QwenImageOptions()), flow_checks.records_of(source_images)
    noise = flow_checks.noise_of(model, 3)
    want = stock(edit_pipeline, records, noise, scale)
    assert flow_checks.far(flow_checks.ode(model, records, noise, scale), want) < 1e-6


def test_pixels_are_the_pipelines_own_on_several_threads(pipeline: Any) -> None:
    records = flow_checks.records_of()
    model = QwenImage(pipeline, tiny.SIZE, QwenImageOptions())
    noise = flow_checks.noise_of(model, 3)
    latents = stock(pipeline, records, noise, 4.0)
    want = flow_checks.as_uint8(stock(pipeline, records, noise, 4.0, output_type="np"))
    with ThreadPoolExecutor(4) as pool:
        decoded = list(pool.map(model.pixels, [latents] * 12))
    for images in decoded:
        assert torch.equal(torch.stack(images), want)


@pytest.mark.parametrize(
    ("edit", "both"),
    [(False, False), *(pytest.param(True, both, marks=pytest.mark.slow) for both in (False, True))],
)
def test_replay_scores_what_was_sampled(
    pipeline: Any, edit_pipeline: Any, source_images: list[Path], edit: bool, both: bool
) -> None:
    chosen, sources = (edit_pipeline, source_images) if edit else (pipeline, ())
    family = qwen_image_edit.FAMILY if edit else FAMILY
    model = flow_checks.generator_of(family, chosen, tiny.SIZE, unconditional_gradient=both)
    assert flow_checks.replay_error(flow_checks.policy_of(model, 4.0), flow_checks.records_of(sources)) < 1e-6


def test_the_gradient_goes_through_both_branches_and_the_scale(pipeline: Any) -> None:
    """Along a direction it is the slope of the guided velocity; with one branch constant it is another."""

    def total(both: bool) -> torch.Tensor:
        model = QwenImage(pipeline, tiny.SIZE, QwenImageOptions(unconditional_gradient=both))
        # So much guidance that an untrained model's branches differ, and the scale with them.
        conditions = model.conditions(flow_checks.records_of(), [], 100.0)
        state = flow_checks.noise_of(model, 3)
        return (model.velocity(conditions, torch.arange(3))(state, 700.0) * state.roll(1)).double().sum()

    weight = pipeline.transformer.proj_out.weight
    start, direction = weight.detach().clone(), weight.detach().roll(1)
    ends = []
    with torch.no_grad():
        for step in (1e-2, -1e-2):
            weight.copy_(start + step * direction)
            ends.append(total(True))
        weight.copy_(start)
    weight.requires_grad_(True)
    exact, part = (float((torch.autograd.grad(total(both), weight)[0] * direction).sum()) for both in (True, False))
    slope = float(ends[0] - ends[1]) / 2e-2
    assert exact == pytest.approx(slope, rel=1e-2)
    assert abs(part - slope) > 0.05 * abs(slope)


def test_a_single_step_is_refused_before_any_work(pipeline: Any, tmp_path: Path) -> None:
    """Its scheduler's noise levels are not numbers then, and neither are the pictures."""
    steps = {"steps": 2, "guidance_scale": 4.0}
    sampling = {"rollout": steps, "eval": {**steps, "steps": 1}}
    spec = resolve(parameters(tmp_path, policy={"train": "dit"}, sampling=sampling), family=FAMILY)
    with pytest.raises(UserError, match=r"steps of a sampler are 1, .* needs at least 2.* sampling\.eval\.steps"):
        spec.build(pipeline)


def test_an_edit_pipeline_needs_its_processor(edit_pipeline: Any, tmp_path: Path) -> None:
    edit_pipeline.save_pretrained(tmp_path)
    family = find_family("auto", str(tmp_path))
    assert family is qwen_image_edit.FAMILY
    shutil.rmtree(tmp_path / "processor")
    with pytest.raises(UserError, match=r"lacks processor\."):
        family.load(str(tmp_path), CPU)
