"""Saved models of every family but GLM-Image, which all tests have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.families.qwen_image import tiny as qwen_image
from tests.models.families.sd3 import tiny as sd3


@pytest.fixture(scope="session")
def sd3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sd3")
    sd3.pipeline().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def qwen_image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen_image")
    qwen_image.pipeline().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def vl_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With many end tokens, so that some of its random answers reach one."""
    from visual_grpo.starter.qwen2_5_vl import build_model, build_processor

    torch.set_num_threads(1)
    folder, processor = tmp_path_factory.mktemp("vl"), build_processor(64, 64)
    model = build_model(processor, seed=1)
    model.generation_config.eos_token_id = [processor.tokenizer.eos_token_id, *range(8)]
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
