"""The demo's shapes for a Stable Diffusion 3 of the real classes with 111 million parameters, pretrained on a GPU.

Its configuration is conf/sd3_small with what `learning.py` changes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from examples.flow_models.models import SMALL_SD3, build_sd3
from examples.flow_models.pretrain import SmallFlowModel, pretrain_flow
from visual_grpo.starter.pretraining import Advance, Job
from visual_grpo.starter.worlds import SHAPES, SmallModel, World


def _pretrain(model: SmallFlowModel, job: Job, advance: Advance) -> None:
    torch.set_float32_matmul_precision("high")  # TF32
    pretrain_flow(model, job, advance, device="cuda" if torch.cuda.is_available() else "cpu")


# The learning rate falls with the width, and a batch costs a GPU little more than a few rows.
_LARGE = replace(
    SMALL_SD3,
    build=partial(build_sd3, layers=12, heads=8, head=64, patch=2),
    batch=192,
    peak_learning_rate=5e-4,
)
_TINY = replace(_LARGE, build=partial(build_sd3, layers=1, heads=2, head=16, patch=2), batch=4)
pretrain_large, pretrain_tiny = partial(_pretrain, _LARGE), partial(_pretrain, _TINY)


def _world(pretrain: str) -> World:
    return replace(SHAPES, models={"sd3": SmallModel(pretrain={f"{__name__}:{pretrain}": ("vae", "dit")})})


LARGE, TINY = _world("pretrain_large"), _world("pretrain_tiny")
