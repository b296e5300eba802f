"""Every parameter of the project, typed. What a YAML file or ``--params`` may say stands here.

Unknown keys are refused; ``parameters.py`` turns pydantic's complaint into one that names the
nearest valid key. Units and sources are in the field descriptions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Side = Annotated[int, Field(ge=32, le=4096, multiple_of=32, description="pixels, a multiple of 32")]
Share = Annotated[float, Field(ge=0, lt=1)]
World = Literal["shapes", "words", "scenes"]
Dtype = Literal["float32", "bfloat16", "float16"]
Task = Literal["t2i", "i2i", "mixed", "segmentation"]


class Strict(BaseModel):
    """Immutable; an unknown key and a number that is not finite are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DataConfig(Strict):
    """Where the records are and how they are prepared."""

    path: str = Field(description="folder with records, or a records.jsonl / prompts.txt / metadata file")
    layout: Literal["auto", "records", "prompts", "image_folder", "captions", "seg_zero"] = Field(
        "auto", description="how path is read; auto = the first that fits"
    )
    task: Task = Field(
        "t2i",
        description="t2i: prompts; i2i: edits, each record with a source image or several; mixed: both;"
        " segmentation: a query about one source image, and its mask as the target",
    )
    height: Side
    width: Side
    eval_share: Share = Field(0.1, description="share of records set aside for evaluation; their prompts may train")
    held_out_share: Share = Field(0.2, description="share of prompts that never occur in training")
    strict: bool = Field(False, description="stop at the first rejected record instead of reporting it")

    @model_validator(mode="after")
    def _something_is_left_to_train_on(self) -> Self:
        if self.eval_share + self.held_out_share >= 1:
            raise ValueError(
                f"eval_share + held_out_share must be below 1, got {self.eval_share} + {self.held_out_share}"
            )
        return self


class StarterConfig(Strict):
    """The small model that is built and pretrained on the spot when ``model.path`` is null."""

    world: World = Field(
        "shapes",
        description="what is drawn: coloured shapes, signs with words (text in images), or scenes of objects with parts"
        " (negative points)",
    )
    dataset: str = Field("data/01_raw/shapes", description="folder that the drawn dataset is written to")
    model: str = Field("data/06_models/base", description="folder that the pretrained pipeline is written to")
    records_per_prompt: int = Field(ge=1, description="records drawn of each of 150 objects, 256 words or 8 queries")
    vae_steps: int = Field(ge=1, description="optimiser steps of the VAE, of each attempt")
    dit_steps: int = Field(ge=1, description="optimiser steps of the DiT")
    ar_steps: int = Field(ge=1, description="optimiser steps for each kind of record: mixed takes twice as many")
    vl_steps: int = Field(1000, ge=1, description="world scenes: steps of the small Qwen2.5-VL")
    processes: int = Field(2, ge=1, le=2, description="halves of the pretraining that run at a time, a core each")


class ModelConfig(Strict):
    """Which model, and how it is held in memory."""

    family: str = Field(
        "auto",
        description="glm_image, sd3, qwen_image, qwen2_5_vl or package.module:FAMILY; auto = recognised from the saved"
        " model; with path null the one that the starter draws starter.world for",
    )
    path: str | None = Field(None, description="folder or hub id of a saved model; null = the starter's")
    dtype: Dtype = Field("float32", description="of the weights; float16 is trained with loss scaling")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    threads: int = Field(1, ge=1, description="CPU threads of torch; results can differ in their last bits")
    options: dict[str, object] = Field(
        default_factory=dict, description="of the family, as instruction and max_tokens of qwen2_5_vl"
    )


class LoraParams(Strict):
    rank: int = Field(8, ge=1, description="of the two matrices added to each target")
    alpha: int = Field(16, ge=1, description="their product is scaled by alpha / rank")
    target_modules: str | list[str] | None = Field(
        None, description="peft's target_modules; null = the attention and MLP matrices of the policy's module"
    )


class FlowConfig(Strict):
    """Which denoising steps of a flow module are stochastic, and so decisions that can be trained."""

    sampler: Literal["sde", "cps"] = Field("sde", description="transition; see policies/flow_sde.py")
    noise: float = Field(0.7, gt=0, description="noise level a of the transition; cps: at most 1")
    window_start: int | None = Field(
        0, ge=0, description="first stochastic step; null = drawn for every rollout, the same for all its samples"
    )
    window_steps: int | None = Field(
        1, ge=1, description="stochastic steps, ODE elsewhere; null = every step but the last, which has no variance"
    )
    train_share: float = Field(
        1.0, gt=0, le=1, description="share of the stochastic steps that are trained, drawn for every rollout"
    )
    ratio_norm: bool = Field(False, description="GRPO-Guard's normalised ratio (arXiv 2510.22319)")

    @model_validator(mode="after")
    def _cps_noise_is_an_angle(self) -> Self:
        if self.sampler == "cps" and self.noise > 1:
            raise ValueError(f"noise of the cps sampler is at most 1 (a quarter turn), got {self.noise}")
        return self


class SignalCheckConfig(Strict):
    """Whether the policy gradients of independent rollouts agree, before anything is trained."""

    rollouts: int = Field(
        48,
        ge=0,
        description="independent rollouts a module at most, drawn until they can tell; 0 = off; 3 to 5 are measured and"
        " shown, but stop no run unless least_cosine is set",
    )
    least_cosine: float | None = Field(
        None,
        description="the run stops where the mean cosine between their gradients is less by two standard errors; null ="
        " where it cannot be told from 0 although a useful one, at most .05 and 1 / (grpo.steps + 1), would have been",
    )

    @field_validator("rollouts")
    @classmethod
    def _enough_for_an_error(cls, rollouts: int) -> int:
        if rollouts in (1, 2):
            raise ValueError("at least 3, since fewer have no standard error and chance would stop the run; 0 = off")
        return rollouts


class PolicyConfig(Strict):
    """What is trained, and how its samples are computed."""

    train: str | list[str] = Field(
        "all", description="all modules of the model's family, or the names of some: ar, dit (GLM-Image), vl, ..."
    )
    stages: Literal["alternating", "joint"] = Field(
        "alternating", description="two modules: a rollout for each in turn, or one rollout that trains both"
    )
    lora: LoraParams = Field(LoraParams(), description="of every module; modules.NAME.lora sets another one")
    flow: FlowConfig = FlowConfig()
    signal_check: SignalCheckConfig = SignalCheckConfig()
    gradient_checkpointing: bool = Field(False, description="recompute activations backward: less memory, more time")
    share_prefix: bool = Field(True, description="run each prompt once per group; off under gradient checkpointing")
    share_start_noise: bool = Field(True, description="one start noise of the decoder per prompt")
    denoise_batch: int = Field(64, ge=1, description="images denoised at a time; on a CPU, by each core")
    decode_batch: int = Field(8, ge=1, description="images decoded by the VAE at a time; on a CPU, by each core")
    rollout_batch: int = Field(64, ge=1, description="rows of tokens sampled at a time")


class SamplerConfig(Strict):
    """How samples are drawn. Temperature, top_p and top_k are for token modules, the rest is for flow modules."""

    temperature: float | None = Field(None, gt=0, description="null falls back to the model's generation_config")
    top_p: float | None = Field(None, gt=0, le=1, description="null falls back to the model's generation_config")
    top_k: int | None = Field(None, ge=0, description="0 = off; null falls back to the model's generation_config")
    steps: int | None = Field(None, ge=1, description="denoising steps")
    guidance_scale: float | None = Field(None, ge=1, description="classifier-free guidance, 1 = off")
    stochastic: bool = Field(False, description="denoise with the noise of policy.flow, as training samples are drawn")

    def denoising(self) -> tuple[int, float]:
        """Steps and guidance scale of a flow module; raises ValueError where they are not set."""
        if self.steps is None or self.guidance_scale is None:
            raise ValueError(f"a flow module needs steps and guidance_scale of its sampler, got {self}")
        return self.steps, self.guidance_scale


class SamplingConfig(Strict):
    rollout: SamplerConfig
    stock: SamplerConfig

    @model_validator(mode="after")
    def _rollout_is_untruncated(self) -> Self:
        r = self.rollout
        if r.top_p not in (None, 1) or r.top_k not in (None, 0):
            raise ValueError(
                "sampling.rollout can have no top_p below 1 and no top_k above 0: a truncated distribution biases the"
                " importance ratio"
            )
        if r.stochastic or self.stock.stochastic:
            raise ValueError("leave stochastic out: the evaluation judges with and without it")
        return self


class RewardConfig(Strict):
    """One reward: a built-in by name or any ``package.module:function``."""

    function: str | None = Field(None, description="package.module:function; null = the built-in of this name")
    weight: float = Field(1.0, description="0 = reported, never optimised")
    options: dict[str, object] = Field(default_factory=dict, description="keyword arguments of the reward")


class GRPOConfig(Strict):
    """The algorithm. Token clips are about 0.2 in units of the probability ratio."""

    loss: Literal["grpo", "dr_grpo", "dapo", "gspo"] = Field(
        "grpo", description="ratio, aggregation and default clips; see grpo/losses.py"
    )
    steps: int = Field(ge=1, description="rollouts; each is followed by updates_per_rollout updates")
    prompts_per_step: int = Field(ge=1, description="prompts of a rollout, a group of samples each")
    group_size: int = Field(ge=1, description="samples of each prompt")
    updates_per_rollout: int = Field(1, ge=1, description="optimiser updates on the same samples; 1 = on-policy")
    micro_batch_size: int | None = Field(None, ge=1, description="rows per backward pass; null = all at once")
    learning_rate: float = Field(gt=0, description="of AdamW, before warm-up and schedule")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.99), description="of AdamW"
    )
    weight_decay: float = Field(0.0, ge=0, description="of AdamW")
    warmup_steps: int = Field(0, ge=0, description="optimiser updates of linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="learning rate after warm-up; linear and cosine fall to 0"
    )
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are scaled down to this norm")
    clip_low: float | None = Field(
        None, gt=0, lt=1, description="ratio is clipped below at 1 - clip_low; null = the loss's own (grpo 0.2)"
    )
    clip_high: float | None = Field(
        None, gt=0, description="ratio is clipped above at 1 + clip_high; null = the loss's own (dapo 0.28)"
    )
    kl_weight: float = Field(
        0.0, ge=0, description="weight of the k3 KL to the adapter-disabled reference, nats a token"
    )
    advantage_scale: Literal["group", "batch", "batch_centred", "none"] | None = Field(
        None,
        description="the standard deviation that advantages are divided by; group: of the group's rewards; batch: of"
        " all raw rewards of the step, as TRL's scale_rewards=batch and flow_grpo's global_std; batch_centred: of all"
        " rewards less their group's mean, as gdpo has it; none; null = the loss's own (dr_grpo none, else group)",
    )
    advantage_epsilon: float = Field(1e-4, gt=0, description="added to the standard deviation, in units of reward")
    advantage_clip: float = Field(5.0, gt=0, description="largest absolute advantage")
    combine: Literal["sum", "gdpo"] = Field("sum", description="gdpo: normalise each reward before the weighted sum")
    max_refills: int = Field(0, ge=0, description="dapo: further rollouts to replace zero-variance groups")
    ratio_tolerance: float | None = Field(
        None, gt=0, description="largest |log ratio| accepted before the first update; null = the dtype's floor"
    )


class ModuleConfig(Strict):
    """What differs for one module of the model; null = as for all.

    A flow module's log-probs are in a unit (``policies.flow_sde.log_prob``) in which a clip of 0.2 means what it means
    for a token.
    """

    prompts_per_step: int | None = Field(None, ge=1, description="as grpo.prompts_per_step")
    group_size: int | None = Field(
        None, ge=1, description="as grpo.group_size; of the second stage in a joint rollout: decodes of each sample"
    )
    updates_per_rollout: int | None = Field(None, ge=1, description="as grpo.updates_per_rollout")
    micro_batch_size: int | None = Field(None, ge=1, description="as grpo.micro_batch_size")
    learning_rate: float | None = Field(None, gt=0, description="as grpo.learning_rate")
    clip_low: float | None = Field(None, gt=0, lt=1, description="as grpo.clip_low")
    clip_high: float | None = Field(None, gt=0, description="as grpo.clip_high")
    kl_weight: float | None = Field(
        None, ge=0, description="as grpo.kl_weight; of a flow module the closed-form Gaussian KL, nats a latent element"
    )
    advantage_epsilon: float | None = Field(None, gt=0, description="as grpo.advantage_epsilon")
    lora: LoraParams | None = Field(None, description="as policy.lora")
    rewards: dict[str, float] = Field(
        default_factory=dict,
        description="weights in this module's training, where they are not rewards.NAME.weight",
    )

    def grpo(self) -> dict[str, Any]:
        """What differs from the shared `GRPOConfig`."""
        tree = self.model_dump(exclude={"lora", "rewards"})
        return {name: value for name, value in tree.items() if value is not None}


class EvaluationConfig(Strict):
    every: int = Field(ge=0, description="training steps between evaluations on eval prompts; 0 = only at the end")
    prompts: int = Field(ge=1, description="eval prompts used while training")
    images_per_prompt: int = Field(ge=1, description="images of each eval and held-out prompt in baseline and evaluate")
    max_prompts: int | None = Field(None, ge=1, description="at most so many prompts of each split; null = all")
    batch_size: int = Field(32, ge=1, description="images generated at a time")
    bootstrap_samples: int = Field(5000, ge=100, description="resamples of the prompts behind each interval")
    adapter: Literal["best", "last"] = Field(
        "best", description="the adapter of a run: best on eval prompts while training, or that of the last step"
    )


class TrackingConfig(Strict):
    checkpoints: str = Field("data/06_models/checkpoints", description="folder of the checkpoints")
    checkpoint_every: int = Field(10, ge=1, description="training steps between checkpoints")
    images_every: int = Field(10, ge=0, description="training steps between sample grids; 0 = none")
    keep_checkpoints: int = Field(2, ge=1, description="the newest ones; older ones are deleted")


class Parameters(Strict):
    """The whole parameter tree."""

    seed: int = Field(ge=0, lt=2**31, description="of every draw: starter, split, rollouts, intervals")
    resume: Literal["auto", "never"] = Field(
        "never", description="auto: go on from the newest checkpoint, in its MLflow run; never: start at step 1"
    )
    data: DataConfig
    starter: StarterConfig
    model: ModelConfig
    policy: PolicyConfig
    modules: dict[str, ModuleConfig] = Field(
        default_factory=dict, description="per-module overrides: a section for each module whose settings differ"
    )
    sampling: SamplingConfig
    rewards: dict[str, RewardConfig] = Field(min_length=1)
    grpo: GRPOConfig
    evaluation: EvaluationConfig
    tracking: TrackingConfig

    @model_validator(mode="after")
    def _the_starter_draws_the_task(self) -> Self:
        world, task = self.starter.world, self.data.task
        if self.model.path is not None:
            return self
        if (task == "segmentation") != (world == "scenes"):
            raise ValueError(
                "the starter's scenes are drawn for data.task segmentation and nothing else is;"
                f" got starter.world {world} with data.task {task}"
            )
        if world == "words" and task != "t2i":
            raise ValueError(f"starter.world words is drawn for data.task t2i only, got {task}")
        return self

    @model_validator(mode="after")
    def _module_weights_are_of_rewards(self) -> Self:
        for name, module in self.modules.items():
            for reward in module.rewards:
                if reward not in self.rewards:
                    raise ValueError(
                        f"modules.{name}.rewards names {reward!r}, which is not in rewards: {', '.join(self.rewards)}"
                    )
        return self

    def grpo_of(self, module: str) -> GRPOConfig:
        """The algorithm's settings for one module."""
        own = self.modules.get(module)
        return self.grpo if own is None else self.grpo.model_copy(update=own.grpo())

    def lora_of(self, module: str) -> LoraParams:
        own = self.modules.get(module)
        return self.policy.lora if own is None or own.lora is None else own.lora

    def weights(self, modules: Sequence[str]) -> dict[str, float]:
        """Each reward's weight: of one module in its training, the mean over several where they are judged together."""
        return {
            name: sum(self._weight(name, reward.weight, module) for module in modules) / len(modules)
            for name, reward in self.rewards.items()
        }

    def _weight(self, reward: str, shared: float, module: str) -> float:
        own = self.modules.get(module)
        return shared if own is None else own.rewards.get(reward, shared)

    @model_validator(mode="before")
    @classmethod
    def _null_removes(cls, tree: object) -> object:
        """An environment cannot leave out a reward or a module of conf/base, but it can set it to null.

        A reward that was removed takes its weights in the modules' sections along.
        """
        if not isinstance(tree, dict):
            return tree
        rewards, modules = tree.get("rewards"), tree.get("modules")
        removed = {name for name, reward in rewards.items() if reward is None} if isinstance(rewards, dict) else set()
        changed = dict(tree)
        if isinstance(rewards, dict):
            changed["rewards"] = _without_null(rewards)
        if isinstance(modules, dict):
            changed["modules"] = {
                name: _without_weights(module, removed) for name, module in _without_null(modules).items()
            }
        return changed


def _without_null(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in entries.items() if entry is not None}


def _without_weights(module: Any, removed: set[str]) -> Any:
    weights = module.get("rewards") if isinstance(module, dict) else None
    if not isinstance(weights, dict):
        return module
    return {**module, "rewards": {name: weight for name, weight in weights.items() if name not in removed}}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"grpo": {"steps": 2}}`` -> ``{"grpo.steps": 2}``."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return flat
