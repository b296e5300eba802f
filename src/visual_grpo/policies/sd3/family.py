"""The Stable Diffusion 3 family: what it is called, what it can do, and how it is loaded."""

from __future__ import annotations

from typing import Any

from visual_grpo.config import ModelConfig
from visual_grpo.policies import mmdit
from visual_grpo.policies.family import Family
from visual_grpo.policies.flow_generator import FlowGenerator
from visual_grpo.policies.loading import load_pipeline
from visual_grpo.policies.sd3.model import Sd3, Sd3Options

_PARTS = ("tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2", "vae", "transformer", "scheduler")
_T5 = ("tokenizer_3", "text_encoder_3")
_MODULES = mmdit.modules("ff", "ff_context")


def load(path: str, config: ModelConfig) -> Any:
    """A folder or hub id, frozen; T5 may be missing, and with ``max_sequence_length`` 0 is not loaded."""
    without = _T5 if config.options.get("max_sequence_length") == 0 else ()
    return load_pipeline("StableDiffusion3Pipeline", path, config, _PARTS, without)


FAMILY = Family(
    name="sd3",
    modules=_MODULES,
    tasks=("t2i",),
    saved_as=("StableDiffusion3Pipeline",),
    load=load,
    build=FlowGenerator.builder(Sd3, _MODULES),
    options=Sd3Options,
)
