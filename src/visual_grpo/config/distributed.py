"""Several processes that train together."""

from __future__ import annotations

from pydantic import Field

from visual_grpo.config.base import Strict


class DistributedConfig(Strict):
    processes: int = Field(
        1,
        ge=1,
        description="that train together on this machine, each with the whole model, on a GPU of its own where"
        " model.device is cuda; each draws and replays whole groups, so at most grpo.prompts_per_step",
    )
