"""Attention backends: refused by name or where they do not work, and applied to one model alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.families.flux import tiny as flux
from tests.models.families.sd3 import tiny as sd3
from visual_grpo.common.errors import UserError
from visual_grpo.config import ModelConfig
from visual_grpo.models.execution import attention_of
from visual_grpo.models.family import find_family
from visual_grpo.models.family_check import RECORDS
from visual_grpo.training.components import load_model

SIZE = (64, 96)
FUSED = "_scaled_dot_product_flash_attention_for_cpu"
REFUSED = [
    ("flux", "flush", r"'flush', which dit cannot compute with; expected one of flash, .*native.* or null"),
    ("flux", "sdpa", "'sdpa', which dit cannot compute with"),
    ("qwen2_5_vl", "flash_attention_2", "'flash_attention_2', which vl cannot .*; expected one of sdpa, eager, for"),
    ("glm_image", "sdpa", r"'sdpa', which dit cannot .* for each of several modules as model\.attention\.MODULE=NAME"),
    ("glm_image", {"ar": "sdpa", "vl": "native"}, "names 'vl'; the family has the modules ar, dit"),
    ("flux", "flash", r"'flash', which does not work on cpu with float32 and a gradient: .*install `flash-attn"),
    (
        "flux",
        "flex",
        "'flex', which does not work on cpu .*backward on CPU.* choose a different one of flash, .*native",
    ),
]


def asked(attention: Any) -> ModelConfig:
    return ModelConfig(path="unused", device="cpu", attention=attention)


@pytest.mark.parametrize(("family", "attention", "complaint"), REFUSED)
def test_a_backend_that_does_not_fit_is_refused(family: str, attention: Any, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        attention_of(asked(attention), find_family(family).modules)


def test_it_is_refused_before_the_model_is_loaded() -> None:
    with pytest.raises(UserError, match="'flush', which dit cannot compute with"):
        load_model("there/is/none", family="flux", attention="flush", device="cpu")


def test_a_transformer_without_a_choice_is_refused(tmp_path: Path) -> None:
    sd3.pipeline(t5=False).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"SD3Transformer2DModel always calls torch's .* Leave model\.attention out"):
        load_model(str(tmp_path), size=SIZE, device="cpu", attention="native")


class Kernels(TorchDispatchMode):
    """Names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_a_flow_model_computes_the_same_by_the_named_kernels_and_the_next_model_by_its_own(tmp_path: Path) -> None:
    flux.pipeline().save_pretrained(tmp_path)

    def velocity(attention: Any) -> tuple[torch.Tensor, bool]:
        model: Any = load_model(str(tmp_path), size=SIZE, device="cpu", attention=attention).model
        field = model.velocity(model.conditions(RECORDS[:1], [1], 1.0), torch.arange(1))
        noise = torch.randn(1, *model.latent_shape, generator=torch.Generator().manual_seed(0))
        with Kernels() as kernels:
            found = field(noise, model.schedule(3).timesteps[0])
        return found, FUSED in kernels.names

    expected, fused = velocity(None)
    assert fused
    for attention, by_fused in (("_native_math", False), (None, True), ({"dit": "_native_math"}, False)):
        found, fused = velocity(attention)
        assert fused == by_fused
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_each_module_has_the_backend_of_its_library(pipeline_folder: Path) -> None:
    named = {"ar": "eager", "dit": "_native_math"}
    networks: Any = load_model(str(pipeline_folder), size=SIZE, device="cpu", attention=named).networks()
    assert networks["ar"].config.get_text_config()._attn_implementation == "eager"
    assert {block.attn1.processor._attention_backend for block in networks["dit"].transformer_blocks} == {
        "_native_math"
    }


def test_cudnns_attention_is_not_torchs_choice(tmp_path: Path) -> None:
    """Its gradients may be NaN; a switch of torch, which no CPU heeds."""
    flux.pipeline().save_pretrained(tmp_path)
    torch.backends.cuda.enable_cudnn_sdp(True)
    load_model(str(tmp_path), size=SIZE, device="cpu")
    assert not torch.backends.cuda.cudnn_sdp_enabled()
