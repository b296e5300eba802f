"""The pipelines beside the data flow: draw, score and compare pictures, look at rewards, votes, plan, reproduce."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from visual_grpo.config.base import AdapterName, Name, NotEmpty, Strict

Seed = Field(0, ge=0, lt=2**31, description="of what is drawn")
Sampler = Literal["rollout", "stock"]


class GenerateConfig(Strict):
    prompt: str | None = Field(None, description='one prompt; in "..." where it would be read as something else')
    prompts: str | None = Field(None, description="file or folder in any layout of data.path; null = prompt")
    samples: int = Field(1, ge=1, description="of each prompt")
    sampler: Sampler = Field("stock", description="sampling.stock or sampling.rollout")
    seed: int = Seed


class ScoreConfig(Strict):
    path: NotEmpty | None = Field(
        None, description="folder of pictures with prompts: captions, an image folder, or what generate wrote"
    )


class CompareConfig(Strict):
    """Adapters as the parameter ``adapter`` names them; none = the base model."""

    first: AdapterName = Field("none", description="what is compared with")
    second: AdapterName = Field("latest", description="what is judged")


class RewardReportConfig(Strict):
    prompts: int = Field(16, ge=2, description="training prompts that the base model draws")
    samples: int = Field(8, ge=2, description="of each prompt, as a group of a training")
    sampler: Sampler = Field("rollout", description="sampling.rollout, as a training's samples, or sampling.stock")


class VoteConfig(Strict):
    choices: str | None = Field(None, description="file of all choices; null = OUTPUT/01_raw/votes/choices.jsonl")
    source: str = Field(
        "draw",
        description="what is chosen between: draw (samples of training prompts), ab (blind: the base model's and the"
        " trained model's samples of held-out prompts), or a folder that generate wrote",
    )
    pairs: int = Field(100, ge=1, description="pairs of pictures; those already judged are not shown again")
    adapter: AdapterName = Field("none", description="which adapter draws the pairs; none = the base model")
    sampler: Sampler = Field("rollout", description="sampling.rollout or sampling.stock; ab shows stock")
    seed: int = Seed
    voter: str = Field("me", min_length=1, max_length=60, description="who chooses; the page can change it")
    port: int = Field(0, ge=0, le=65535, description="of the page on this machine; 0 = a free one")
    open_browser: bool = Field(True, description="show the page where there is a screen")


class PlanConfig(Strict):
    """Counts memory and operations of a training, without weights or a GPU."""

    gpu: Name | None = Field(
        None, description="a card, such as L4, RTX 4090, L40S, A100 80GB or H100; null = the smallest that fits"
    )
    price_per_hour: float | None = Field(None, ge=0, description="of one card; null = no cost is given")
    prompt_words: int = Field(64, ge=1, le=2048, description="length of the prompts; a word is about a token")
    tables: bool = Field(False, description="print every phase, not only the answer; plan.json always has all")


class GpuCheckConfig(Strict):
    """Takes steps of each trained module on the GPU and compares them with the plan."""

    prompts: int = Field(1, ge=1, description="prompts of each step, with grpo.group_size samples each")
    steps: int = Field(2, ge=1, description="of each module; the last one is timed")


class ReproduceConfig(Strict):
    tolerance: float = Field(
        0.05,
        ge=0,
        description="largest difference of the final metrics where a GPU takes part, as a share of the run's value (of"
        " 1, where that is smaller); on a CPU every bit must be the same",
    )
    keep: bool = Field(False, description="keep the temporary folder; what does not match is always kept")
