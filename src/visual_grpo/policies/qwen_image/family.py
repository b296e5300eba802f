"""The Qwen-Image family, with Qwen-Image-Edit: what it is called, what it can do, and how it is loaded."""

from __future__ import annotations

from typing import Any

from visual_grpo.config import ModelConfig
from visual_grpo.policies.family import Family, ModelSettings, Module
from visual_grpo.policies.flow_generator import FlowGenerator
from visual_grpo.policies.loading import load_pipeline, saved_class
from visual_grpo.policies.lora import PipelineAdapter
from visual_grpo.policies.qwen_image.model import Conditions, QwenImage, QwenImageOptions

_PARTS = ("tokenizer", "text_encoder", "vae", "transformer", "scheduler")
_EDIT = "QwenImageEditPipeline"
MODULES = {
    "dit": Module(
        kind="flow",
        adapter=PipelineAdapter,
        targets=[
            *("to_q", "to_k", "to_v", "to_out.0", "img_mlp.net.0.proj", "img_mlp.net.2"),
            *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
        ],
        advice=(
            "a reward that sees what the early steps decide (layout, objects, text); policy.flow.noise between .4 and"
            " 1; policy.flow.window_start=0; policy.share_start_noise=true; more grpo.prompts_per_step"
        ),
    )
}


def load(path: str, config: ModelConfig) -> Any:
    """A folder or hub id, frozen."""
    if saved_class(path) == _EDIT:
        return load_pipeline(_EDIT, path, config, (*_PARTS, "processor"))
    return load_pipeline("QwenImagePipeline", path, config, _PARTS)


def build(pipeline: Any, settings: ModelSettings) -> FlowGenerator[Conditions]:
    return FlowGenerator(QwenImage(pipeline, settings.size, settings.options), MODULES, settings)


FAMILY = Family(
    name="qwen_image",
    modules=MODULES,
    tasks=("t2i", "i2i"),
    saved_as=("QwenImagePipeline", _EDIT),
    load=load,
    build=build,
    options=QwenImageOptions,
)
