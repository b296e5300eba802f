"""The released configurations, planned by their own parameters: what must hold of each before a GPU is paid for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.plan.page import CONFIGURATIONS, parameters_of
from visual_grpo.plan.attention import fused_attention
from visual_grpo.plan.host_values import literals_with_values
from visual_grpo.plan.make import make_plan
from visual_grpo.plan.meter import Meter
from visual_grpo.plan.models import planned_model
from visual_grpo.plan.released.words import prompt_of
from visual_grpo.plan.repeats import fewer_repeats
from visual_grpo.plan.time_model import CALIBRATION
from visual_grpo.types import PromptRecord

WAITS = {
    "glm_image": 382,
    "glm_image, decoder": 476,
    "glm_image, 24 GB": 1035,
    "glm_image, decoder, 24 GB": 476,
    "glm_image, 4 bits, 24 GB": 1035,
    "qwen_image, 4 bits, 24 GB": 356,
    "sd3": 173,
    "qwen_image": 356,
    "qwen_image, 48 GB": 356,
    "qwen2_5_vl": 334,
    "qwen2_5_vl, 3B": 334,
}
"""Host waits of a step, as docs/plan.md says; fewer are better."""
PARAMETERS = {
    "glm_image": {"vision_language_encoder": 10.11, "transformer": 6.93},
    "sd3": {"transformer": 2.24, "text_encoder_3": 4.76},
    "qwen_image": {"transformer": 20.43, "text_encoder": 8.29},
    "qwen2_5_vl": {"model": 8.29, "segmenter": 0.217},
    "qwen2_5_vl, 3B": {"model": 3.75},
}
"""Billions, as published (GLM-Image's: 9 + 7 with its vision tower; SD3.5 medium's 2.5 count its fixed positions)."""
WEIGHTS = {"glm_image": 35.3, "sd3": 18.3}
"""GB without adapters, as conf/sd3 and the counted GLM-Image say."""

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_released_configuration_fits_its_card_and_mixes_no_devices(name: str) -> None:
    environment, changes = CONFIGURATIONS[name]
    settings = {**changes.get("plan", {}), "largest_batches": False}
    plan = make_plan(parameters_of(environment, {**changes, "plan": settings}))
    assert plan["fits"], plan["changes"]
    assert plan["mixed_devices"] == {}
    assert sum(phase["host_waits"] for phase in plan["step"]) <= WAITS[name]
    for part, billions in PARAMETERS.get(name, {}).items():
        assert plan["parameters"][part] / 1e9 == pytest.approx(billions, abs=0.01)
    if name in WEIGHTS:
        assert plan["weights_gb"] - 4 * plan["trained_parameters"] / 1e9 == pytest.approx(WEIGHTS[name], abs=0.1)
    assert all(phase["peak_gb"] <= plan["peak_gb"] for phase in plan["step"])
    assert plan["run"]["hours"] > plan["run"]["steps"] / 3600 > 0


@pytest.mark.parametrize("point", [p for p in CALIBRATION if p.size == 1024], ids=lambda p: f"{p.size}x{p.images}")
def test_a_call_of_glm_image_takes_the_published_memory(point: Any) -> None:
    """The stock pipeline denoises and decodes all images at once."""
    together = {"denoise_batch": point.images, "decode_batch": point.images}
    config = parameters_of("glm_image", {"policy": together, "data": {"height": point.size, "width": point.size}})
    planned, meter = planned_model(config), Meter()
    for network in planned.networks.values():
        meter.hold([*network.parameters(), *network.buffers()])
    records = [PromptRecord(id=str(n), prompt=prompt_of(64, n)) for n in range(point.images)]
    repeats = fewer_repeats(meter, lambda _: None)
    with torch.no_grad(), repeats, fused_attention("cuda"), literals_with_values(), meter:
        planned.model.generate(records, list(range(point.images)), config.sampling.stock)
    assert meter.peak / 1e9 == pytest.approx(point.peak_gb, rel=0.1)
