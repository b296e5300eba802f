"""The pipelines: the data flow's names, and the parameters of the pipelines outside it."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from visual_grpo.common.digests import plain_dataset
from visual_grpo.config.base import AdapterName, Name, NotEmpty, OnRequest, Stated, Strict, Words
from visual_grpo.config.data import DataChecks
from visual_grpo.config.places import ROOT

DATA_FLOW = ("starter", "data_preparation", "baseline", "train", "evaluate")
"""The pipelines of the data flow, in their order."""
Seed = Field(0, ge=0, lt=2**31, description="seed of the generated samples")
Sampler = Literal["rollout", "eval"]
Records = Annotated[NotEmpty, AfterValidator(plain_dataset)]
"""A place of records, as ``data.path`` names it."""


class GenerateConfig(OnRequest):
    prompt: Words | None = Field(
        None, description='one prompt; write it in "..." where it would be read as something else'
    )
    prompts: Records | None = Field(None, description="records in any layout of data.path; null = prompt")
    samples: int = Field(1, ge=1, description="samples of each prompt")
    sampler: Sampler = Field("eval", description="sampling.eval or sampling.rollout")
    seed: int = Seed


class ScoreConfig(OnRequest):
    path: Records | None = Field(
        None, description="folder of pictures with prompts: captions, an image folder, or what generate wrote"
    )


class CompareConfig(OnRequest):
    """Adapters as the parameter ``adapter`` names them; none = the base model."""

    first: AdapterName = Field("none", description="the model that is compared with")
    second: AdapterName = Field("latest", description="the model that is judged")

    @property
    def adapter(self) -> str:
        """The adapter whose training decides the parameters."""
        return self.first if self.second == "none" else self.second


class RewardReportConfig(OnRequest):
    prompts: int = Field(16, ge=2, description="number of training prompts, for which the base model generates samples")
    samples: int = Field(8, ge=2, description="of each prompt, as a group of a training")
    sampler: Sampler = Field("rollout", description="sampling.rollout, as a training's samples, or sampling.eval")


class VoteConfig(OnRequest):
    choices: str | None = Field(None, description="file of all choices; null = OUTPUT/01_raw/votes/choices.jsonl")
    source: str = Field(
        "draw",
        description="where the pictures come from: draw (samples of training prompts), ab (blind: the base model's "
        "and the trained model's samples of held-out prompts), or a folder that generate wrote",
    )
    pairs: int = Field(100, ge=1, description="pairs of pictures; those already judged are not shown again")
    adapter: AdapterName = Field("none", description="the adapter that generates the pairs; none = the base model")
    sampler: Sampler = Field("rollout", description="sampling.rollout or sampling.eval; ab shows eval")
    seed: int = Seed
    voter: Words = Field("me", min_length=1, max_length=60, description="who chooses; the page can change it")
    port: int = Field(0, ge=0, le=65535, description="of the page on this machine; 0 = a free one")
    open_browser: bool = Field(True, description="show the page where there is a screen")


class PlanConfig(OnRequest):
    """Counts memory and operations of a training, without weights or a GPU."""

    gpu: Annotated[Name, Stated()] | None = Field(
        None, description="a card, such as L4, RTX 4090, L40S, A100 80GB or H100; null = the smallest that fits"
    )
    prompt_words: int = Field(64, ge=1, le=2048, description="length of the prompts; a word is about a token")
    sources: int = Field(1, ge=1, le=16, description="source images of an edit, each of data.height x data.width")


class GpuCheckConfig(OnRequest):
    """Takes steps of each trained module on the GPU and compares them with the plan."""

    prompts: int = Field(1, ge=1, description="prompts of each step, with grpo.group_size samples each")
    steps: int = Field(2, ge=1, description="of each module; the last one is timed")


class PublishConfig(OnRequest):
    """Uploads the adapter that the parameter ``adapter`` names, with its card, to the hub."""

    repository: str | None = Field(None, pattern=r"^[\w.-]+/[\w.-]+$", description="OWNER/NAME on the hub")
    base_model: str | None = Field(
        None,
        pattern=r"^[\w.-]+/[\w.-]+$",
        description="hub id of the base model, where the training read a copy of it from a folder",
    )
    private: bool = Field(
        True, description="a new repository is seen by its owner only; an existing one stays as it is"
    )


class ReproduceConfig(OnRequest):
    tolerance: float = Field(
        0.05,
        ge=0,
        description="largest difference of the final metrics where a GPU takes part, as a share of the run's value (of"
        " 1, where that is smaller); on a CPU every bit must be the same",
    )
    keep: bool = Field(False, description="keep the temporary folder; what does not match is always kept")


PACKAGE = "visual_grpo"
CHAMPION = "champion"


class GateRule(OnRequest):
    """Conditions that a candidate must meet against each reference (`evaluation.gate`)."""

    gates_per_year: int = Field(
        52,
        ge=1,
        description="promotions that may be asked for in 365 days, each with an equal part of error; more are refused",
    )
    error: float = Field(
        0.05, gt=0, lt=0.5, description="probability that a year of gates promotes an adapter that is not better"
    )
    margin: float = Field(0.0, ge=0, description="gain in total reward to be shown over the champion and the base")
    max_guard_fall: float = Field(
        0.25, ge=0, description="most that a reward of weight 0 may fall, as a share of its mean before"
    )
    max_unscored_rise: float = Field(
        0.02, ge=0, le=1, description="most that the share of samples that cannot be scored may rise"
    )
    subgroups: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict,
        description="key of the records' metadata: most that the total may fall among records of the same value",
    )

    @property
    def alpha(self) -> float:
        """One-sided level of every bound of one gate."""
        return self.error / self.gates_per_year


class PromotionConfig(GateRule):
    """The champion, a version of a registered model in MLflow to which an alias points, and its gate."""

    model: Words | None = Field(
        None,
        pattern=r"^[^/:]*[^/:\s][^/:]*$",
        description="name of the registered model in MLflow, without / and :; null = visual_grpo, or visual_grpo-NAME"
        " for an output folder data/NAME",
    )
    alias: Words = Field(
        CHAMPION,
        pattern=r"^[A-Za-z0-9_-]+$",
        description="the alias that a promotion moves: models:/NAME@champion is the champion",
    )
    candidate: AdapterName = Field("latest", description="the adapter that asks to become champion")
    max_prompts: int | None = Field(None, ge=2, description="most held-out prompts that are judged; null = all")
    new_reward: bool = Field(
        False, description="allow a candidate trained with a different reward, which then judges both"
    )
    rolled_back: bool = Field(False, description="allow adapters whose promotion was rolled back")
    base_copy_mb: float = Field(
        200,
        ge=0,
        description="largest local base model (MB), without links, that is copied into a version; else path and digest",
    )

    @field_validator("alias")
    @classmethod
    def _is_not_reserved(cls, alias: str) -> str:
        if re.fullmatch(r"(?i)latest|v\d+", alias):
            raise ValueError(f"MLflow reserves latest and v1, v2, ..., got {alias!r}")
        return alias

    def name(self, output: str) -> str:
        """The registered model's name for the results in the folder ``output``."""
        return self.model or "-".join([PACKAGE, *_words(PurePath(output))])


def _words(output: PurePath) -> list[str]:
    """The folders that tell ``output`` apart, as MLflow allows them in a name."""
    inside = output.relative_to(ROOT) if output.is_relative_to(ROOT) else output
    return [word for part in inside.parts if (word := re.sub(r"[^\w.-]+", "_", part).strip("_"))]


class MonitorConfig(Strict):
    """A score that somebody else measures, such as of the pictures that users get."""

    command: str | None = Field(
        None, description="a shell command whose last printed line is the score, a number; null = nothing is monitored"
    )
    floor: float = Field(0.0, description="a retraining begins when the score is below it")


class RetrainConfig(OnRequest):
    """Parameters of ``python -m visual_grpo.operations.retraining`` (`make retrain`)."""

    when: Literal["changed", "always"] = Field(
        "changed",
        description="changed: where data, code, parameters or the monitored score ask for it; always: at each call,"
        " with the next training seed if nothing has changed",
    )
    start: Literal["base", "champion"] = Field(
        "base", description="adapters that a retraining starts from: base (fresh ones), or champion, if it exists"
    )
    monitor: MonitorConfig = MonitorConfig()
    update: bool = Field(True, description="first update the data of dvc import and dvc import-url")
    data: DataChecks = DataChecks()
    hours: float | None = Field(
        None,
        gt=0,
        description="limit of the wall time: the retraining stops with a checkpoint, and the next call resumes it; "
        "null = no limit",
    )
    max_steps: int | None = Field(None, ge=1, description="refuse more grpo.steps than these; null = no limit")
    keep_versions: int | None = Field(
        10, ge=2, description="newest versions of the registered model to keep, in addition to those in use; null = all"
    )
    keep_runs: int | None = Field(
        None, ge=2, description="newest MLflow runs to keep, in addition to those of kept versions; null = all"
    )
    commit: str | None = Field(None, description="branch on which dvc.lock is committed; null = no commit")
    notify: str | None = Field(
        None, description="shell command that reads the summary (JSON) from its standard input; null = none"
    )
    notify_when: Literal["always", "work", "failure"] = Field(
        "work",
        description="always; work: unless there was nothing to do; failure: only for exit codes other than 0 and 3",
    )
