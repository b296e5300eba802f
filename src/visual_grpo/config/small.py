"""The pipelines beside the data flow: draw and score pictures, compare adapters, look at rewards, let people choose."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from visual_grpo.config.base import AdapterName, NotEmpty, Strict


class GenerateConfig(Strict):
    prompt: str | None = Field(None, description='one prompt; in "..." where it would be read as something else')
    prompts: str | None = Field(
        None, description="file or folder in any layout of data.path, such as prompts.txt; null = prompt"
    )
    samples: int = Field(1, ge=1, description="of each prompt")
    sampler: Literal["stock", "rollout"] = Field("stock", description="sampling.stock or sampling.rollout")
    seed: int = Field(0, ge=0, lt=2**31, description="of the samples")


class ScoreConfig(Strict):
    path: NotEmpty | None = Field(
        None, description="folder of pictures with prompts: captions, an image folder, or what generate wrote"
    )


class CompareConfig(Strict):
    """Each as the parameter ``adapter``: latest, a folder, an MLflow run's id or name, models:/NAME@ALIAS; none = the
    base model."""

    first: AdapterName = Field("none", description="what is compared with")
    second: AdapterName = Field("latest", description="what is judged")


class RewardReportConfig(Strict):
    prompts: int = Field(16, ge=2, description="training prompts that the base model draws")
    samples: int = Field(8, ge=2, description="of each prompt, as a group of a training")
    sampler: Literal["rollout", "stock"] = Field(
        "rollout", description="sampling.rollout, as the samples of a training, or sampling.stock"
    )


class VoteConfig(Strict):
    choices: str | None = Field(
        None, description="file of all choices; null = 01_raw/votes/choices.jsonl in the folder output"
    )
    source: str = Field(
        "draw",
        description="what is chosen between: draw (samples of training prompts), ab (blind: the base model's and the"
        " trained model's samples of held-out prompts), or a folder that generate wrote",
    )
    pairs: int = Field(100, ge=1, description="pairs of pictures; those already judged are not shown again")
    adapter: AdapterName = Field(
        "none", description="which adapter draws the pairs, as the parameter adapter; none = the base model"
    )
    sampler: Literal["rollout", "stock"] = Field(
        "rollout", description="sampling.rollout, as the samples of a training, or sampling.stock; ab shows stock"
    )
    seed: int = Field(0, ge=0, lt=2**31, description="of the pairs, their order and their sides")
    voter: str = Field("me", min_length=1, max_length=60, description="who chooses; the page can change it")
    port: int = Field(0, ge=0, le=65535, description="of the page on this machine; 0 = a free one")
    open_browser: bool = Field(True, description="show the page where there is a screen")
