"""The Qwen2.5-VL family: a language model that answers queries about images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, field_validator

from visual_grpo.config import ModelConfig, Strict
from visual_grpo.policies.family import Family, ModelSettings, Module
from visual_grpo.policies.loading import loading, place
from visual_grpo.policies.lora import PeftAdapter
from visual_grpo.policies.qwen2_5_vl.answer_model import AnswerModel, EncodedQueries
from visual_grpo.policies.token_generator import TokenGenerator

if TYPE_CHECKING:
    from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor


class Options(Strict):
    """How Qwen2.5-VL is asked and how long it may answer."""

    instruction: str = Field("{query}", description="what the model reads beside the image; {query} is the record's")
    max_tokens: int = Field(32, ge=1, description="tokens of an answer, its end included, before it is cut off")

    @field_validator("instruction")
    @classmethod
    def _names_the_query(cls, instruction: str) -> str:
        if "{query}" not in instruction:
            raise ValueError("it must contain {query}, where the record's query is put")
        return instruction


MODULES = {
    "vl": Module(
        kind="tokens",
        adapter=PeftAdapter,
        targets=r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)",
        advice="a reward that sees what the answers say; a higher sampling.rollout.temperature; more"
        " grpo.prompts_per_step; a larger grpo.group_size",
    )
}

Loaded = tuple["Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLProcessor"]


def load(path: str, config: ModelConfig) -> Loaded:
    """Model and processor of a folder or hub id by plain ``from_pretrained``, frozen and in evaluation mode."""
    import torch
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    from visual_grpo.hardware.device import resolve_device
    from visual_grpo.hardware.quantised import check_base_weights, quantise

    device = resolve_device(config.device)
    check_base_weights(config.base_weights, device)
    with loading(path):
        processor = AutoProcessor.from_pretrained(path, revision=config.revision)
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            path, dtype=getattr(torch, config.dtype), revision=config.revision, use_safetensors=True
        )
    model.eval().requires_grad_(False)
    quantise({"model": model}, config.base_weights, device, kept=device)
    place({"model": model}, device)
    return model, processor


def build(loaded: Loaded, settings: ModelSettings) -> TokenGenerator[EncodedQueries]:
    options: Options = settings.options
    network, processor = loaded
    answers = AnswerModel(network, processor, instruction=options.instruction, max_tokens=options.max_tokens)
    return TokenGenerator(answers, MODULES, settings)


FAMILY = Family(
    name="qwen2_5_vl",
    modules=MODULES,
    tasks=("segmentation",),
    saved_as=("Qwen2_5_VLForConditionalGeneration",),
    load=load,
    build=build,
    options=Options,
)
