"""The Stable Diffusion 3 family: what it is called, what it can do, and how it is loaded."""

from __future__ import annotations

from typing import Any

from visual_grpo.config import ModelConfig
from visual_grpo.policies.family import Family, ModelSettings, Module
from visual_grpo.policies.flow_generator import FlowGenerator
from visual_grpo.policies.loading import load_pipeline
from visual_grpo.policies.lora import PipelineAdapter
from visual_grpo.policies.sd3.model import Conditions, Sd3, Sd3Options

_PARTS = ("tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2", "vae", "transformer", "scheduler")
_T5 = ("tokenizer_3", "text_encoder_3")
MODULES = {
    "dit": Module(
        kind="flow",
        adapter=PipelineAdapter,
        targets=[
            *("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"),
            *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "ff_context.net.0.proj", "ff_context.net.2"),
        ],
        advice=(
            "a reward that sees what the early steps decide (layout, objects, text); policy.flow.noise between .4 and"
            " 1; policy.flow.window_start=0; policy.share_start_noise=true; more grpo.prompts_per_step"
        ),
    )
}


def load(path: str, config: ModelConfig) -> Any:
    """A folder or hub id, frozen; T5 may be missing, and with ``max_sequence_length`` 0 is not loaded."""
    without = _T5 if config.options.get("max_sequence_length") == 0 else ()
    return load_pipeline("StableDiffusion3Pipeline", path, config, _PARTS, without)


def build(pipeline: Any, settings: ModelSettings) -> FlowGenerator[Conditions]:
    return FlowGenerator(Sd3(pipeline, settings.size, settings.options), MODULES, settings)


FAMILY = Family(
    name="sd3",
    modules=MODULES,
    tasks=("t2i",),
    saved_as=("StableDiffusion3Pipeline",),
    load=load,
    build=build,
    options=Sd3Options,
)
