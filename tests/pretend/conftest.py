"""Saved models of every family but GLM-Image, which all tests have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.families.flux import tiny as flux
from tests.models.families.flux2_klein import tiny as flux2_klein
from tests.models.families.ltx import tiny as ltx
from tests.models.families.qwen2_5_vl.tiny import save_qwen3_vl
from tests.models.families.qwen_image import tiny as qwen_image
from tests.models.families.sd3 import tiny as sd3
from tests.models.families.wan import tiny as wan
from tests.models.families.z_image import tiny as z_image


def saved(pipeline: Callable[[], Any]) -> Any:
    """A fixture: the folder of a small pipeline."""

    @pytest.fixture(scope="session")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("family")
        pipeline().save_pretrained(folder)
        return folder

    return folder


sd3_folder = saved(sd3.pipeline)
qwen_image_folder = saved(qwen_image.pipeline)
flux_folder = saved(flux.pipeline)
flux2_klein_folder = saved(flux2_klein.pipeline)
z_image_folder = saved(z_image.pipeline)
wan_folder = saved(wan.pipeline)
ltx_folder = saved(ltx.pipeline)
wan_i2v_folder = saved(partial(wan.pipeline, i2v=True))
flux_kontext_folder = saved(partial(flux.pipeline, kontext=True))
qwen_image_edit_folder = saved(partial(qwen_image.pipeline, edit=True))
qwen_image_edit_plus_folder = saved(partial(qwen_image.pipeline, plus=True))


@pytest.fixture(scope="session")
def vl_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With many end tokens, so that some of its random answers reach one."""
    from examples.scenes.small_qwen2_5_vl import build_model, build_processor

    torch.set_num_threads(1)
    folder, processor = tmp_path_factory.mktemp("vl"), build_processor(64, 64)
    model = build_model(processor, seed=1)
    model.generation_config.eos_token_id = [processor.tokenizer.eos_token_id, *range(8)]
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def qwen3_vl_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vl")
    save_qwen3_vl(folder)
    return folder
