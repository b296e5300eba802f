"""The whole parameter tree; units are in the field descriptions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, field_validator, model_validator

from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.config.base import AdapterName, NotEmpty, OnRequest, Strict
from visual_grpo.config.credentials import find_secrets
from visual_grpo.config.data import DataConfig, StarterConfig
from visual_grpo.config.decides import Decides
from visual_grpo.config.pipelines import (
    CompareConfig,
    GenerateConfig,
    GpuCheckConfig,
    PlanConfig,
    PromotionConfig,
    PublishConfig,
    ReproduceConfig,
    RetrainConfig,
    RewardReportConfig,
    ScoreConfig,
    VoteConfig,
)
from visual_grpo.config.policy import DistributedConfig, LoraParams, ModelConfig, PolicyConfig, SamplingConfig
from visual_grpo.config.presets import AUTO, LISTED, PRESETS, PresetName, with_rewards
from visual_grpo.config.rewards import RewardConfig, is_loggable
from visual_grpo.config.training import (
    AlarmConfig,
    EvaluationConfig,
    GRPOConfig,
    ModuleConfig,
    TrackingConfig,
    TrainConfig,
)


class Resume(StrEnum):
    """Values of the parameter ``resume`` that name no folder."""

    AUTO, SAME, NEVER = "auto", "same", "never"


class Parameters(Strict):
    """The whole parameter tree."""

    output: Annotated[NotEmpty, Decides.NOTHING] = Field(
        "data",
        description="folder of all results; null = data, data/NAME for an environment, and a folder in that, named"
        " after data.path, for data of your own",
    )
    seed: Annotated[int, Decides.TRAINING] = Field(
        ge=0, lt=2**31, description="seed of everything random except the evaluation: starter, split, rollouts"
    )
    resume: Annotated[str, Decides.NOTHING] = Field(
        Resume.NEVER.value,
        min_length=1,
        description="auto: from the newest checkpoint, with its parameters and MLflow run; same: only if it belongs to"
        " this very training, unfinished; or a folder of one or more checkpoints; never: start at step 1",
    )
    adapter: Annotated[AdapterName, Decides.JUDGEMENT] = Field(
        "latest",
        description="the adapter that evaluate judges and generate uses: latest, a folder, an MLflow run's id or name,"
        " models:/NAME@ALIAS or models:/NAME/VERSION, or (generate) none = the base",
    )
    trust: Annotated[list[str], Decides.NOTHING] = Field(
        [],
        description="digest, or digests, of other people's folders whose provenance may name code, addresses, files and"
        " variables: at least 32 hex digits, as the error message shows; null = none",
    )
    generate: GenerateConfig = GenerateConfig()
    score: ScoreConfig = ScoreConfig()
    compare: CompareConfig = CompareConfig()
    reward_report: RewardReportConfig = RewardReportConfig()
    vote: VoteConfig = VoteConfig()
    promotion: PromotionConfig = PromotionConfig()
    publish: PublishConfig = PublishConfig()
    plan: PlanConfig = PlanConfig()
    gpu_check: GpuCheckConfig = GpuCheckConfig()
    run: Annotated[AdapterName | None, Decides.NOTHING] = Field(
        None, description="the training that reproduce repeats: an MLflow run's id or name, its adapters, or latest"
    )
    reproduce: ReproduceConfig = ReproduceConfig()
    data: DataConfig
    starter: StarterConfig
    model: ModelConfig
    policy: PolicyConfig
    distributed: DistributedConfig = DistributedConfig()
    modules: dict[str, ModuleConfig] = Field(
        default_factory=dict, description="per-module overrides: a section for each module whose settings differ"
    )
    sampling: SamplingConfig
    reward: Annotated[Literal["auto", PresetName] | None, Decides.SCORES] = Field(
        "auto",
        description="preset of rewards (config/presets.py); auto = what the records allow; null = rewards and guards",
    )
    rewards: dict[str, RewardConfig] = Field(
        default_factory=dict,
        description="rewards that are added to the preset's, or replace them by name; null removes one",
    )
    train: TrainConfig = TrainConfig()
    grpo: GRPOConfig
    alarm: AlarmConfig = AlarmConfig()
    evaluation: EvaluationConfig
    tracking: TrackingConfig
    retrain: RetrainConfig = RetrainConfig()

    @field_validator("trust", mode="before")
    @classmethod
    def _are_digests(cls, value: Any) -> list[str]:
        given = [] if value is None else value if isinstance(value, list | tuple) else [value]
        for digest in given:
            if not re.fullmatch("[0-9a-f]{32,64}", str(digest)):
                raise ValueError(f"expected 32 to 64 hex digits, the digest of one folder, got {digest!r}")
        return [str(digest) for digest in given]  # Digits alone are a number on the command line.

    @field_validator("rewards")
    @classmethod
    def _have_names_for_metrics(cls, rewards: dict[str, RewardConfig]) -> dict[str, RewardConfig]:
        for name in rewards:
            if not is_loggable(f"reward/{name}"):
                raise ValueError(
                    f"MLflow takes no metric that is named after {name!r}: use letters, digits, spaces and _ - . : only"
                )
        return rewards

    @model_validator(mode="after")
    def _holds_no_secret(self) -> Self:
        for name in find_secrets(self.public()):
            raise ValueError(
                f"{name} looks like a secret, and parameters are stored with every run. Put it into a variable of the"
                " environment. An option of a reward may name that: $NAME"
            )
        return self

    @model_validator(mode="after")
    def _something_is_rewarded(self) -> Self:
        if self.reward == AUTO:  # Which rewards there are is not known yet.
            return self
        if not self.rewards:
            presets = ", ".join(name for name, preset in PRESETS.items() if preset.rewards)
            raise ValueError(
                f"nothing is rewarded: set reward to auto or one of {presets}, or name a reward in rewards"
            )
        for name, module in self.modules.items():
            for reward in module.rewards:
                if reward not in self.rewards:
                    raise ValueError(
                        f"modules.{name}.rewards names {reward!r}, which is not in rewards: {', '.join(self.rewards)}"
                    )
        return self

    @model_validator(mode="after")
    def _judges_beside_what_is_optimised(self) -> Self:
        by_module = [module.rewards for module in self.modules.values()]
        weights = {name: [r.weight, *(m.get(name, 0.0) for m in by_module)] for name, r in self.rewards.items()}
        optimised = [name for name, own in weights.items() if max(own) > 0 <= min(own)]
        for name, reward in self.rewards.items() if self.reward != AUTO else ():
            if reward.judge and any(weights[name]):
                raise ValueError(
                    f"rewards.{name} is a judge, and a module has a weight for it: a judge is never optimised"
                )
            if reward.judge_of is not None and reward.judge_of not in optimised:
                raise ValueError(
                    f"rewards.{name}.judge_of names {reward.judge_of!r}; expected a reward that is optimised, with no"
                    f" weight below 0: {', '.join(optimised)}, or null for the total."
                    f"{nearest_hint(reward.judge_of, optimised)}"
                )
            for other in reward.only_where:
                if not reward.judge and other in self.rewards and self.rewards[other].judge:
                    raise ValueError(
                        f"rewards.{name}.only_where names {other!r}, a judge, and judges do not score rollouts. Name a"
                        " reward that is not a judge"
                    )
        return self

    @model_validator(mode="after")
    def _pretrains_its_own_model(self) -> Self:
        if self.starter.pretrain and not self.model_is_pretrained:
            raise ValueError(
                f"starter.pretrain is true, but model.path names {self.model.path}, which is not the starter's model."
                " Leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _rollouts_have_the_shape_of_what_is_judged(self) -> Self:
        rollout, data = self.sampling.rollout, self.data
        height, width = rollout.height or data.height, rollout.width or data.width
        if height * data.width != width * data.height:
            raise ValueError(
                f"training samples would be {height} x {width} pixels (sampling.rollout), in a different shape than the"
                f" {data.height} x {data.width} of data.height and data.width, to which sources and targets are"
                " cropped. Set both sides to the same share"
            )
        return self

    @model_validator(mode="after")
    def _evaluates_before_it_stops(self) -> Self:
        if self.train.early_stopping_patience and not self.evaluation.every:
            raise ValueError(
                "train.early_stopping_patience counts evaluations, and evaluation.every is 0. Set evaluation.every to a"
                " number of steps, or leave the patience out"
            )
        return self

    @property
    def data_is_rendered(self) -> bool:
        """True if the records are those that the starter renders."""
        return self.data.path == self.starter.dataset

    @property
    def model_is_pretrained(self) -> bool:
        """True if the model is the small one that the starter pretrains."""
        return self.model.path == self.starter.model

    @property
    def named_adapter(self) -> str:
        """The parameter ``adapter``; none where it names no earlier training."""
        return "none" if self.adapter == "latest" else self.adapter

    @property
    def training_seed(self) -> int:
        return self.seed if self.train.seed is None else self.train.seed

    def grpo_of(self, module: str) -> GRPOConfig:
        section = self.modules.get(module)
        return self.grpo if section is None else self.grpo.model_copy(update=section.grpo())

    def lora_of(self, module: str) -> LoraParams:
        section = self.modules.get(module)
        return self.policy.lora if section is None or section.lora is None else section.lora

    def public(self) -> dict[str, Any]:
        """All values as JSON, but for what is the command's alone: ``trust``, and ``retrain``, which may hold a secret
        address.

        The rewards of the preset are in ``rewards``, so that reading the tree again adds none that was removed.
        """
        reward = AUTO if self.reward == AUTO else LISTED
        return self.model_dump(mode="json", exclude={"retrain", "trust"}) | {"reward": reward}

    @property
    def removed_rewards(self) -> tuple[str, ...]:
        """Rewards that are null: they are also left out of a preset that the records choose."""
        return self._removed

    def weights(self, modules: Sequence[str]) -> dict[str, float]:
        """Each reward's weight: of one module in its training, the mean over several where they are judged together.

        Raises UserError where the weights of several modules cancel, so that no reward is left to judge by.
        """
        own = {
            name: {m: self.modules.get(m, ModuleConfig()).rewards.get(name, reward.weight) for m in modules}
            for name, reward in self.rewards.items()
        }
        means = {name: sum(weights.values()) / len(modules) for name, weights in own.items()}
        cancelling = {name: weights for name, weights in own.items() if any(weights.values())}
        if cancelling and not any(means.values()):
            of = (
                f"{name} has {' and '.join(f'{weight:g} in {m}' for m, weight in weights.items())}"
                for name, weights in cancelling.items()
            )
            raise UserError(
                "an evaluation judges all trained modules by one total, in which a reward has the mean of its weights,"
                f" and these cancel: {', '.join(of)}. Set other weights (modules.MODULE.rewards), or train one module"
                " (policy.train)"
            )
        return means

    _removed: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _completed(cls, tree: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Fills in the rewards of the preset, and of a module's LoRA what ``policy.lora`` gives.

        An environment cannot leave out a reward or a module of conf/base or of a preset, but it can set it to null.
        """
        if not isinstance(tree, Mapping):
            return handler(tree)
        made = handler(_with_shared_lora(with_rewards(tree)))
        made._removed = tuple(name for name, entry in (tree.get("rewards") or {}).items() if entry is None)
        return made


def _with_shared_lora(tree: dict[str, Any]) -> dict[str, Any]:
    policy, modules = tree.get("policy"), dict(tree["modules"])
    shared = policy.get("lora") if isinstance(policy, Mapping) else None
    for name, section in modules.items():
        own = section.get("lora") if isinstance(section, Mapping) else None
        if isinstance(shared, Mapping) and isinstance(own, Mapping):
            modules[name] = {**section, "lora": {**shared, **own}}
    return {**tree, "modules": modules}


ON_REQUEST = (
    "run",
    *(
        name
        for name, field in Parameters.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, OnRequest)
    ),
)
"""Parameters and sections of the pipelines outside the data flow, which no result of the flow depends on."""


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"grpo": {"steps": 2}}`` -> ``{"grpo.steps": 2}``."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return flat


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``tree`` with the values of ``changes``, section by section."""
    both = dict(tree)
    for name, change in changes.items():
        before = both.get(name)
        if isinstance(before, Mapping) and isinstance(change, Mapping):
            change = merged(before, change)
        both[name] = change
    return both
