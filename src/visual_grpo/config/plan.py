"""Settings of the pipelines plan and gpu_check."""

from __future__ import annotations

from pydantic import Field

from visual_grpo.config.base import Name, Strict


class PlanConfig(Strict):
    """Counts memory and operations of a training, without weights or a GPU."""

    gpu: Name | None = Field(None, description="card, such as L4, RTX 4090 or H100; null = the smallest that fits")
    price_per_hour: float | None = Field(None, ge=0, description="of one card; null = no cost is given")
    prompt_words: int = Field(64, ge=1, le=2048, description="length of the planned prompts; a word is about a token")
    tables: bool = Field(False, description="print every phase, not only the answer; plan.json always has all")


class GpuCheckConfig(Strict):
    """Takes steps of each trained module on the GPU and compares them with the plan."""

    prompts: int = Field(1, ge=1, description="prompts of a step, with grpo.group_size samples each")
    steps: int = Field(2, ge=1, description="of each module; the last one is timed")
