"""The Qwen-Image family, with Qwen-Image-Edit: what it is called, what it can do, and how it is loaded."""

from __future__ import annotations

from typing import Any

from visual_grpo.config import ModelConfig
from visual_grpo.policies import mmdit
from visual_grpo.policies.family import Family
from visual_grpo.policies.flow_generator import FlowGenerator
from visual_grpo.policies.loading import load_pipeline, saved_class
from visual_grpo.policies.qwen_image.model import QwenImage, QwenImageOptions

_PARTS = ("tokenizer", "text_encoder", "vae", "transformer", "scheduler")
_EDIT = "QwenImageEditPipeline"
_MODULES = mmdit.modules("img_mlp", "txt_mlp")


def load(path: str, config: ModelConfig) -> Any:
    """A folder or hub id, frozen."""
    if saved_class(path) == _EDIT:
        return load_pipeline(_EDIT, path, config, (*_PARTS, "processor"))
    return load_pipeline("QwenImagePipeline", path, config, _PARTS)


FAMILY = Family(
    name="qwen_image",
    modules=_MODULES,
    tasks=("t2i", "i2i"),
    saved_as=("QwenImagePipeline", _EDIT),
    load=load,
    build=FlowGenerator.builder(QwenImage, _MODULES),
    options=QwenImageOptions,
)
