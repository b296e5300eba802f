"""docs/my_family.py, a family that docs/own_model.md explains, on a tiny AuraFlow of the real classes."""

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

from tests.models.families.sd3 import tiny
from tests.operations.plan.configurations import parameters_of
from tests.small_project import merged
from visual_grpo.common.errors import UserError
from visual_grpo.config import ModelConfig
from visual_grpo.config.validation import validate
from visual_grpo.models.family import find_family
from visual_grpo.models.family_check import check_family
from visual_grpo.models.run_spec import options_of, resolve
from visual_grpo.starter.world_defaults import with_world
from visual_grpo.training import components

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "own_model.md"


@pytest.fixture(autouse=True)
def my_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    shutil.copy(ROOT / "docs" / "my_family.py", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_family", None)


def test_it_draws_as_its_pipeline_does(tmp_path: Path) -> None:
    tiny_aura_flow().save_pretrained(tmp_path / "model")
    family = find_family("my_family:FAMILY")
    options = options_of(family, {"max_sequence_length": 64, "negative_prompt": "blurry"})
    cpu = ModelConfig(path="unused", device="cpu")
    findings = check_family(family, str(tmp_path / "model"), cpu, (64, 96), options, 3.5)
    assert {finding.name: finding.difference for finding in findings if finding.difference > 1e-6} == {}


def test_a_training_begins_only_with_a_family_that_draws_as_its_pipeline_does(tmp_path: Path) -> None:
    tiny_aura_flow().save_pretrained(tmp_path / "model")
    file, model = tmp_path / "my_family.py", str(tmp_path / "model")
    own = {"model": {"family": "my_family:FAMILY", "path": model, "device": "cpu"}, "modules": {"dit": None}}
    config = parameters_of("base", own | {"policy": {"decode_guidance_scale": None}})
    components.build_model(resolve(config), check_own_family=True)
    sys.modules.pop("my_family")
    file.write_text(file.read_text("utf-8").replace("timestep / 1000", "timestep"), "utf-8")
    components.build_model(resolve(config))
    with pytest.raises(
        UserError, match=r"The family aura_flow generates different latents than its pipeline AuraFlowPipeline"
    ):
        components.build_model(resolve(config), check_own_family=True)


def test_the_pages_settings_fit_the_family() -> None:
    files = [(ROOT / "conf" / name / "parameters.yml").read_text("utf-8") for name in ("base", "sd3")]
    shown = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    files += [block for block in shown if "my_family" in block]
    config = validate(with_world(reduce(merged, map(yaml.safe_load, files)) | {"seed": 0}))
    assert config.model.path == "fal/AuraFlow-v0.3"
    spec = resolve(config)
    assert (spec.family.name, spec.modules, spec.options.max_sequence_length) == ("aura_flow", ("dit",), 256)


def tiny_aura_flow() -> Any:
    from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel, FlowMatchEulerDiscreteScheduler

    torch.set_num_threads(1)
    vae, text_encoder = tiny.vae(), tiny.t5_encoder()
    torch.manual_seed(0)
    transformer = AuraFlowTransformer2DModel(
        sample_size=16,
        in_channels=16,
        out_channels=16,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=64,
        caption_projection_dim=32,
        pos_embed_max_size=64,
    )
    return AuraFlowPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
        vae=vae.eval(),
        text_encoder=text_encoder.eval(),
        tokenizer=tiny.t5_tokenizer(),
        transformer=transformer.eval(),
    )
