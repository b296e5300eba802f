"""The released configurations, planned by their own parameters."""

from __future__ import annotations

import re

import pytest
import torch

from tests.operations.plan.configurations import CONFIGURATIONS, ROOT, on_smaller_cards, parameters_of
from visual_grpo.common.types import PromptRecord
from visual_grpo.operations.plan.dry_run import planned_model, prompt_of
from visual_grpo.operations.plan.estimate import make_plan
from visual_grpo.operations.plan.meter import Meter

PARAMETERS = {
    "glm_image": {"vision_language_encoder": 10.11, "transformer": 6.93},
    "sd3": {"transformer": 2.24, "text_encoder_3": 4.76},
    "qwen_image": {"transformer": 20.43, "text_encoder": 8.29},
    "flux": {"transformer": 11.90, "text_encoder_2": 4.76},
    "flux_kontext": {"transformer": 11.90, "text_encoder_2": 4.76},
    "qwen_image_edit_plus": {"transformer": 20.43, "text_encoder": 8.29},
    "z_image": {"transformer": 6.15, "text_encoder": 4.02},
    "flux2_klein": {"transformer": 3.88, "text_encoder": 4.02},
    "wan": {"transformer": 1.42, "text_encoder": 5.68},
    "wan_i2v": {"transformer": 16.39, "image_encoder": 0.63, "text_encoder": 5.68},
    "ltx": {"transformer": 1.92, "text_encoder": 4.76, "vae": 0.42},
    "qwen2_5_vl": {"model": 8.29, "segmenter": 0.217},
    "qwen2_5_vl, 3B": {"model": 3.75},
    "qwen3_vl": {"model": 8.77, "segmenter": 0.217},
    "qwen3_vl, 4B": {"model": 4.44},
}
"""Billions, as published (GLM-Image's: 9 + 7 with its vision tower; SD3.5 medium's 2.5 count its fixed positions)."""
WEIGHTS = {"glm_image": 35.3, "sd3": 18.3}
"""GB without adapters, as conf/sd3 and the counted GLM-Image say."""

STORED = {"wan": "Wan 2.1 T2V 1.3B", "wan_i2v": "I2V 14B", "ltx": "LTX-Video 0.9.0"}
"""Models that are published in float32, as docs/own_model.md calls them where it says what is downloaded."""
PAGE = (ROOT / "docs/own_model.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_released_configuration_fits_its_card_without_a_download(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    environment, changes = CONFIGURATIONS[name]
    plan = make_plan(parameters_of(environment, changes))
    assert plan["fits"], plan["changes"]
    for part, billions in PARAMETERS.get(name, {}).items():
        assert plan["parameters"][part] / 1e9 == pytest.approx(billions, abs=0.01)
    if name in STORED:
        stored = re.search(rf"{STORED[name]} (?:is about )?(\d+) GB", PAGE)
        assert stored is not None
        assert sum(plan["parameters"].values()) * 4 / 1e9 == pytest.approx(int(stored[1]), rel=0.02)
    if name in WEIGHTS:
        assert plan["weights_gb"] - 4 * plan["trained_parameters"] / 1e9 == pytest.approx(WEIGHTS[name], abs=0.1)
    assert all(phase["peak_gb"] <= plan["peak_gb"] for phase in plan["step"])
    assert plan["estimated"]["hours"] > 0


@pytest.mark.parametrize("name", SMALLER := on_smaller_cards())
def test_a_row_of_smaller_cards_fits_with_the_peak_that_the_page_tells(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    environment, changes, peak_gb = SMALLER[name]
    plan = make_plan(parameters_of(environment, changes))
    assert plan["fits"], plan["changes"]
    assert plan["peak_gb"] == pytest.approx(peak_gb, rel=0.02)


# diffusers' documentation of GLM-Image: bfloat16 on one H100.
@pytest.mark.parametrize(("size", "images", "peak_gb"), [(1024, 1, 37.8), (1024, 4, 52)])
def test_a_call_of_glm_image_takes_the_published_memory(size: int, images: int, peak_gb: float) -> None:
    """The stock pipeline denoises and decodes all images at once."""
    together = {"denoise_batch": images, "decode_batch": images}
    config = parameters_of("glm_image", {"policy": together, "data": {"height": size, "width": size}})
    planned, meter = planned_model(config), Meter()
    for network in planned.networks.values():
        meter.hold([*network.parameters(), *network.buffers()])
    records = [PromptRecord(id=str(n), prompt=prompt_of(64, n)) for n in range(images)]
    with torch.no_grad(), meter.counting():
        planned.model.generate(records, list(range(images)), config.sampling.eval)
    assert meter.peak / 1e9 == pytest.approx(peak_gb, rel=0.1)
