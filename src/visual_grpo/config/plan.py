"""What the pipeline plan counts for."""

from __future__ import annotations

from pydantic import Field

from visual_grpo.config.base import Name, Strict


class PlanConfig(Strict):
    """Of the pipeline plan, which needs neither weights nor a GPU; it counts for ``distributed.processes`` cards."""

    gpu: Name | None = Field(
        None,
        description="name of the card that is planned for, such as L4, RTX 4090, L40S, A100 80GB or H100; null = a"
        " CPU, of which only memory and operations are counted",
    )
    price_per_hour: float | None = Field(None, ge=0, description="of one card; null = no cost is given")
    currency: str = Field("USD", min_length=1, max_length=12, description="of the price")
    prompt_words: int = Field(
        64, ge=1, le=2048, description="length of the planned prompts, of which a word is about a token"
    )
    largest_batches: bool = Field(
        True, description="also look for the largest batches that fit; false: only the ones that are set"
    )
