from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from tests.models import flow_checks
from tests.models.families.sd3 import tiny
from visual_grpo.common.errors import UserError
from visual_grpo.config import ModelConfig, PolicyConfig, SamplerConfig
from visual_grpo.models.families.sd3 import FAMILY, Sd3, Sd3Options
from visual_grpo.models.module import ModelSettings
from visual_grpo.models.plain_pipeline import run_plain
from visual_grpo.training.components import load_model

RECORDS = flow_checks.records_of()
CPU = ModelConfig(path="unused", device="cpu")


@pytest.fixture
def pipeline() -> Any:
    return tiny.pipeline()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sd3")
    tiny.pipeline().save_pretrained(folder)
    return folder


def test_each_record_has_its_own_prompt_where_some_are_equal(pipeline: Any) -> None:
    first, second, third = RECORDS
    model = Sd3(pipeline, tiny.SIZE, Sd3Options())
    got = model.conditions([first, second, first, third], [], 1.0).prompts
    want = model.conditions(RECORDS, [], 1.0).prompts
    for text, own in zip(got, [want[row] for row in (0, 1, 0, 2)], strict=True):
        assert torch.equal(text.embeds, own.embeds)
        assert torch.equal(text.pooled, own.pooled)


def test_t5_may_be_missing_or_left_out(folder: Path, tmp_path: Path) -> None:
    tiny.pipeline(t5=False).save_pretrained(tmp_path)
    assert FAMILY.load(str(tmp_path), CPU).text_encoder_3 is None
    assert FAMILY.load(str(folder), CPU).text_encoder_3 is not None
    without = FAMILY.load(str(folder), ModelConfig(path="unused", device="cpu", options={"max_sequence_length": 0}))
    assert without.text_encoder_3 is None
    model = Sd3(without, tiny.SIZE, Sd3Options(max_sequence_length=0))
    assert model.conditions(RECORDS, [], 1.0).prompts[0].embeds.shape[1] == 77


def test_a_size_without_positions_is_refused(pipeline: Any) -> None:
    with pytest.raises(UserError, match=r"64 x 272 is too large: .* positions for 256 pixels .* sampling\.rollout"):
        Sd3(pipeline, (64, 272), Sd3Options())


def test_load_model_reads_the_options_as_a_command_does(folder: Path) -> None:
    model: Any = load_model(str(folder), size=tiny.SIZE, options={"max_sequence_length": 0}, device="cpu").model
    assert model.pipeline.text_encoder_3 is None
    assert {prompt.embeds.shape[1] for prompt in model.conditions(RECORDS, [], 1.0).prompts} == {77}


def test_saved_adapters_draw_the_same_again(pipeline: Any, tmp_path: Path) -> None:
    model = flow_checks.generator_of(FAMILY, pipeline, tiny.SIZE)
    flow_checks.policy_of(model, 4.5)
    model.adapters.save(tmp_path)
    again = flow_checks.generator_of(FAMILY, tiny.pipeline(), tiny.SIZE, attached=False)
    again.adapters.load(tmp_path, ["dit"])
    sampler = SamplerConfig(steps=flow_checks.STEPS, guidance_scale=4.5)
    images = [one.generate(RECORDS, [1, 2, 3], sampler) for one in (again, model)]
    assert torch.equal(torch.stack(images[0]), torch.stack(images[1]))


def test_a_shift_that_depends_on_the_size_is_the_pipelines(pipeline: Any) -> None:
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    settings = ModelSettings(size=tiny.SIZE, policy=PolicyConfig(), options=Sd3Options())
    run = run_plain(FAMILY, pipeline, settings, RECORDS[:1], 5, 1.0)
    assert Sd3(pipeline, tiny.SIZE, Sd3Options()).schedule(5).sigmas == pytest.approx(run.schedule.sigmas)
