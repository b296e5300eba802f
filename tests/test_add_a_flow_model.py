"""docs/my_family.py, a family that docs/own_model.md explains, on a tiny Flux of the real classes."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextModel

from tests.conftest import stir
from tests.evaluation.painter import brightness
from tests.models import flow_checks
from tests.models.families.sd3 import tiny
from tests.small_project import merged
from visual_grpo.config import FlowConfig, GRPOConfig, LoraParams, PolicyConfig, SamplerConfig
from visual_grpo.config.schema import validate
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.models.flow_parts import packed, unpacked
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.training.components import load_policy, make_run_spec

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "own_model.md"
SIZE = (64, 96)
SCALE = 3.5
LENGTH = 64
RECORDS = flow_checks.records_of()


@pytest.fixture(scope="module", params=[True, False], ids=["dev", "schnell"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flux")
    tiny_flux(guidance_embeds=request.param).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def my_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    shutil.copy(ROOT / "docs" / "my_family.py", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_family", None)


def test_it_is_the_pipeline_and_its_replay_is_the_sampler(folder: Path) -> None:
    policy = policy_of(folder)
    stir(policy)
    noise = flow_checks.noise_of(policy.model, 3)
    latents = stock(policy.model.pipeline, noise)
    assert flow_checks.far(flow_checks.ode(policy.model, RECORDS, noise, SCALE), latents) < 1e-6
    want = flow_checks.as_uint8(stock(policy.model.pipeline, noise, "np"))
    assert torch.equal(torch.stack(policy.model.pixels(latents)), want)
    assert flow_checks.replay_error(policy, RECORDS) < 1e-6


def test_it_trains_and_the_stock_pipeline_loads_the_adapter(folder: Path, tmp_path: Path) -> None:
    policy = policy_of(folder)
    noise = flow_checks.noise_of(policy.model, 3)
    base = stock(policy.model.pipeline, noise)
    config = GRPOConfig(steps=2, prompts_per_step=3, group_size=4, learning_rate=1e-2, kl_weight=0.01)
    steps = list(GRPOTrainer(policy, RewardSet({"brightness": (brightness, 1.0)}), config).fit(RECORDS))
    assert steps[0].values["ratio/first_max_abs_log"] < 1e-4
    trained = stock(policy.model.pipeline, noise)
    assert flow_checks.far(trained, base) > 1e-3
    policy.save_adapter(tmp_path / "dit")

    plain = FluxPipeline.from_pretrained(folder)
    plain.set_progress_bar_config(disable=True)
    assert torch.equal(stock(plain, noise), base)
    plain.load_lora_weights(tmp_path / "dit")
    assert flow_checks.far(stock(plain, noise), trained) < 1e-6


def test_the_pages_settings_fit_the_family() -> None:
    files = [(ROOT / "conf" / name / "parameters.yml").read_text("utf-8") for name in ("base", "sd3")]
    shown = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    files += [block for block in shown if "my_family" in block]
    config = validate(reduce(merged, map(yaml.safe_load, files)) | {"seed": 0})
    assert config.model.path == "black-forest-labs/FLUX.1-dev"
    spec = make_run_spec(config)
    assert (spec.family.name, spec.modules, spec.options.max_sequence_length) == ("flux", ("dit",), 256)


def policy_of(folder: Path) -> Any:
    return load_policy(
        str(folder),
        family="my_family:FAMILY",
        size=SIZE,
        policy=PolicyConfig(flow=FlowConfig(window_start=1, window_steps=2), lora=LoraParams(rank=4, alpha=12)),
        rollout=SamplerConfig(steps=flow_checks.STEPS, guidance_scale=SCALE),
        options={"max_sequence_length": LENGTH},
        kl_reference=True,
        device="cpu",
    )


def stock(pipeline: Any, noise: torch.Tensor, output_type: str = "latent") -> Any:
    """Latents [3, C, h, w] of the pipeline's own call, or its images."""
    images = pipeline(
        prompt=[record.prompt for record in RECORDS],
        latents=packed(noise),
        height=SIZE[0],
        width=SIZE[1],
        num_inference_steps=flow_checks.STEPS,
        guidance_scale=SCALE,
        max_sequence_length=LENGTH,
        output_type=output_type,
    ).images
    return unpacked(images, noise.shape[2]) if output_type == "latent" else images


def tiny_flux(*, guidance_embeds: bool) -> Any:
    torch.set_num_threads(1)
    text_encoder = CLIPTextModel(tiny.clip(1, 32).config)
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        in_channels=64,
        num_layers=2,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=64,
        pooled_projection_dim=32,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 6, 6),
    )
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=guidance_embeds),
        vae=tiny.vae().eval(),
        text_encoder=text_encoder.eval(),
        tokenizer=tiny.clip_tokenizer(),
        text_encoder_2=tiny.t5_encoder().eval(),
        tokenizer_2=tiny.t5_tokenizer(),
        transformer=transformer.eval(),
    )
