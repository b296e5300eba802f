from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import flow_checks
from tests.models.families.sd3 import tiny
from visual_grpo.config import ModelConfig, SamplerConfig
from visual_grpo.models.families.sd3 import FAMILY, Sd3, Sd3Options

RECORDS = flow_checks.records_of()
CPU = ModelConfig(device="cpu")


@pytest.fixture
def pipeline() -> Any:
    return tiny.pipeline()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sd3")
    tiny.pipeline().save_pretrained(folder)
    return folder


def stock(pipeline: Any, rows: slice, noise: torch.Tensor, guidance_scale: float, **more: Any) -> Any:
    return pipeline(
        prompt=[record.prompt for record in RECORDS[rows]],
        latents=noise[rows],
        height=tiny.SIZE[0],
        width=tiny.SIZE[1],
        num_inference_steps=flow_checks.STEPS,
        guidance_scale=guidance_scale,
        **more,
    ).images


@pytest.mark.parametrize(
    ("t5", "length", "guidance_scale"),
    [(True, 24, 4.5), (False, 256, 4.5), (False, 0, 1.0)],
)
def test_the_ode_is_the_pipelines_own(t5: bool, length: int, guidance_scale: float) -> None:
    pipeline = tiny.pipeline(t5=t5)
    model = Sd3(pipeline, tiny.SIZE, Sd3Options(max_sequence_length=length))
    noise = flow_checks.noise_of(model, 3)
    more = {"output_type": "latent", "max_sequence_length": length}
    ours = flow_checks.ode(model, RECORDS, noise, guidance_scale)
    assert flow_checks.far(ours, stock(pipeline, slice(3), noise, guidance_scale, **more)) < 1e-6
    for row in range(3):
        own = slice(row, row + 1)
        alone = flow_checks.ode(model, RECORDS[own], noise[own], guidance_scale)
        assert flow_checks.far(alone, stock(pipeline, own, noise, guidance_scale, **more)) < 1e-6


def test_the_negative_prompt_is_the_pipelines_own(pipeline: Any) -> None:
    model = Sd3(pipeline, tiny.SIZE, Sd3Options(negative_prompt="blurry"))
    noise = flow_checks.noise_of(model, 3)
    want = stock(pipeline, slice(3), noise, 4.5, negative_prompt=["blurry"] * 3, output_type="latent")
    assert flow_checks.far(flow_checks.ode(model, RECORDS, noise, 4.5), want) < 1e-6
    plain = flow_checks.ode(Sd3(pipeline, tiny.SIZE, Sd3Options()), RECORDS, noise, 4.5)
    assert flow_checks.far(plain, want) > 1e-4


def test_each_record_has_its_own_prompt_where_some_are_equal(pipeline: Any) -> None:
    first, second, third = RECORDS
    model = Sd3(pipeline, tiny.SIZE, Sd3Options())
    got = model.conditions([first, second, first, third], [], 1.0).prompts
    want = model.conditions(RECORDS, [], 1.0).prompts
    for text, own in zip(got, [want[row] for row in (0, 1, 0, 2)], strict=True):
        assert torch.equal(text.embeds, own.embeds)
        assert torch.equal(text.pooled, own.pooled)


def test_the_pipeline_loads_the_adapter_by_its_own_call(folder: Path, pipeline: Any, tmp_path: Path) -> None:
    model = flow_checks.generator_of(FAMILY, pipeline, tiny.SIZE)
    noise = flow_checks.noise_of(model.model, 3)
    base = stock(pipeline, slice(3), noise, 4.5, output_type="latent")
    flow_checks.policy_of(model, 4.5)
    trained = stock(pipeline, slice(3), noise, 4.5, output_type="latent")
    assert flow_checks.far(trained, base) > 1e-2
    model.adapters.save(tmp_path)

    loaded = FAMILY.load(str(folder), CPU)
    loaded.load_lora_weights(tmp_path / "dit")
    assert torch.equal(stock(loaded, slice(3), noise, 4.5, output_type="latent"), trained)
    loaded.disable_lora()
    assert torch.equal(stock(loaded, slice(3), noise, 4.5, output_type="latent"), base)
    loaded.unload_lora_weights()
    assert torch.equal(stock(loaded, slice(3), noise, 4.5, output_type="latent"), base)

    again = flow_checks.generator_of(FAMILY, tiny.pipeline(), tiny.SIZE, attached=False)
    again.adapters.load(tmp_path, ["dit"])
    sampler = SamplerConfig(steps=flow_checks.STEPS, guidance_scale=4.5)
    images = [one.generate(RECORDS, [1, 2, 3], sampler) for one in (again, model)]
    assert torch.equal(torch.stack(images[0]), torch.stack(images[1]))


def test_t5_may_be_missing_or_left_out(folder: Path, tmp_path: Path) -> None:
    tiny.pipeline(t5=False).save_pretrained(tmp_path)
    assert FAMILY.load(str(tmp_path), CPU).text_encoder_3 is None
    assert FAMILY.load(str(folder), CPU).text_encoder_3 is not None
    without = FAMILY.load(str(folder), ModelConfig(device="cpu", options={"max_sequence_length": 0}))
    assert without.text_encoder_3 is None
    model = Sd3(without, tiny.SIZE, Sd3Options(max_sequence_length=0))
    assert model.conditions(RECORDS, [], 1.0).prompts[0].embeds.shape[1] == 77
