"""Several processes that train together."""

from __future__ import annotations

from pydantic import Field

from visual_grpo.config.base import Strict


class DistributedConfig(Strict):
    processes: int = Field(
        1,
        ge=1,
        description="that train together on this machine, each with the whole model, and each on another GPU where"
        " model.device is cuda; each draws and replays whole groups, so at most grpo.prompts_per_step",
    )
    sharded: bool = Field(
        False,
        description="each process keeps a part of every layer, which is gathered when it is called (torch's FSDP2): for"
        " a model that does not fit on one GPU; slower than whole models",
    )
