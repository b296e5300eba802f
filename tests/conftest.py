"""What several tests share. Nothing here is trained: weights are drawn, the classes are the real ones."""

from __future__ import annotations

import atexit
import gc
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import importlib_metadata
import pytest
from filelock import FileLock
from hypothesis import settings

if TYPE_CHECKING:
    from visual_grpo.common.types import Policy
    from visual_grpo.models.families.glm_image.model import GlmImage
    from visual_grpo.models.tokens.prompt_cache import Prompts
    from visual_grpo.models.tokens.token_policy import TokenPolicy

# Before torch is imported: with a thread for each core in each of xdist's processes, they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
SIZE = (64, 96)
# The same examples in every run, on machines of any speed; nothing is kept between runs.
settings.register_profile("same examples", derandomize=True, deadline=None, database=None, max_examples=30)
settings.load_profile("same examples")
# A fifth of the time that imports take: the libraries' objects are garbage at no time.
gc.disable()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # So a shell starts what runs in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers() -> int:
    """One more than cores, since tests also wait: for processes, deadlines and the disk."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_finish() -> None:
    gc.set_threshold(10_000, 20, 10)  # From the default 700, 10, 10: most objects die before anything looks for them.
    gc.freeze()
    gc.enable()
    # After pytest's own collections, and before nanobind lists what is left at the end as leaked.
    atexit.register(gc.unfreeze)


@pytest.fixture(scope="session", autouse=True)
def versions_are_read_once() -> Iterator[None]:
    """MLflow parses the metadata of 45 packages for each model that it saves."""
    with patch("importlib_metadata.version", cache(importlib_metadata.version)):
        yield


@pytest.fixture(scope="session")
def pipeline_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved GlmImagePipeline of the starter's classes with random weights and peaky token logits."""
    from tests.models.families.glm_image import tiny

    folder = tmp_path_factory.mktemp("pipeline")
    tiny.save(folder)
    return folder


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """To be copied: making MLflow's tables takes seconds, so the first of xdist's processes makes them for all."""
    import mlflow

    own = tmp_path_factory.getbasetemp()
    file = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "empty.db"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            mlflow.MlflowClient(f"sqlite:///{file}")
    return file


@pytest.fixture
def glm_image(pipeline_folder: Path) -> GlmImage:
    """With an adapter on the AR module."""
    from visual_grpo.training.components import load_model

    model: Any = load_model(str(pipeline_folder), size=SIZE, train=["ar"], device="cpu")
    return model


@pytest.fixture
def ar_policy(glm_image: GlmImage) -> TokenPolicy[Prompts]:
    """The policy of ``glm_image``, whose adapter is not zero: merging, disabling and replaying it can go wrong."""
    from visual_grpo.config import SamplerConfig

    rollout = SamplerConfig(temperature=1.0, top_p=1.0, top_k=0, steps=4, guidance_scale=1.5)
    policy: Any = glm_image.policy("ar", rollout=rollout, evaluation=rollout, kl_reference=True)
    stir(policy)
    return policy


@pytest.fixture(scope="session")
def source_images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Six pictures of the pipeline's size, of blocks in random colours."""
    import numpy as np
    from PIL import Image

    folder, generator = tmp_path_factory.mktemp("sources"), np.random.default_rng(0)
    paths = [folder / f"{number}.png" for number in range(6)]
    for path in paths:
        blocks = generator.integers(0, 256, (SIZE[0] // 8, SIZE[1] // 8, 3), dtype=np.uint8)
        Image.fromarray(blocks.repeat(8, 0).repeat(8, 1)).save(path)
    return paths


@pytest.fixture
def small_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Editing pipelines scale their sources to thousands of pixels instead of a million."""
    from diffusers.pipelines.flux import pipeline_flux_kontext
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus

    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
        real = module.calculate_dimensions
        monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio, real=real: real(area / 128, ratio))
    monkeypatch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", [(64, 96), (80, 80), (128, 64)])


def stir(policy: Policy[Any], scale: float = 0.05) -> None:
    """Gives the adapter an effect."""
    import torch

    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
