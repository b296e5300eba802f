"""Every parameter of the project, typed. What a YAML file or ``--params`` may say stands here.

Unknown keys are refused; ``parameters.py`` turns pydantic's complaint into one that names the
nearest valid key. Units and sources are in the field descriptions.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """Which GLM-Image pipeline, and how it is held in memory."""

    path: str | None = Field(None, description="folder or hub id of a GlmImagePipeline; null = the starter's")
    dtype: Dtype = Field("float32", description="of the weights; float16 is trained with loss scaling")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    threads: int = Field(1, ge=1, description="CPU threads of torch; another number rounds differently")


class LoraParams(Strict):
    rank: int = Field(8, ge=1, description="of the two matrices added to each target")
    alpha: int = Field(16, ge=1, description="their product is scaled by alpha / rank")
    target_modules: str | list[str] | None = Field(
        None, description="peft's target_modules; null = the attention and MLP matrices of the policy's module"
    )


Module = Literal["ar", "dit", "vl"]
"""GLM-Image's two halves, the token generator and the diffusion decoder, or Qwen2.5-VL's language model."""


class VlConfig(Strict):
    """How Qwen2.5-VL is asked and how long it may answer."""

    instruction: str = Field("{query}", description="what the model reads beside the image; {query} is the record's")
    max_tokens: int = Field(32, ge=1, description="tokens of an answer, its end included, before it is cut off")

    @field_validator("instruction")
    @classmethod
    def _names_the_query(cls, instruction: str) -> str:
        if "{query}" not in instruction:
            raise ValueError("it must contain {query}, where the record's query is put")
        return instruction


class FlowConfig(Strict):
    """Which of the DiT's denoising steps are stochastic, and so decisions that can be trained."""

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
    component: Literal["ar", "dit", "both", "vl"] = Field(
        "ar", description="what is trained: GLM-Image's token generator, its decoder, both, or Qwen2.5-VL (vl)"
    )
    both: Literal["alternating", "joint"] = Field(
        "alternating", description="both: a rollout for each module in turn, or one rollout that trains both"
    )
    lora: LoraParams = LoraParams()
    dit_lora: LoraParams | None = Field(None, description="of the DiT; null = as lora, on the DiT's own matrices")
    flow: FlowConfig = FlowConfig()
    vl: VlConfig = VlConfig()
    signal_check: SignalCheckConfig = SignalCheckConfig()
    gradient_checkpointing: bool = Field(False, description="recompute activations backward: less memory, more time")
    share_prefix: bool = Field(True, description="run each prompt once per group; off under gradient checkpointing")
    share_start_noise: bool = Field(True, description="one start noise of the decoder per prompt")
    denoise_batch: int = Field(64, ge=1, description="images denoised by the DiT at a time; on a CPU, by each core")
    decode_batch: int = Field(8, ge=1, description="images decoded by the VAE at a time; on a CPU, by each core")
    rollout_batch: int = Field(64, ge=1, description="rows sampled at a time")

    @property
    def modules(self) -> tuple[Module, ...]:
        """Which modules the component trains."""
        return ("ar", "dit") if self.component == "both" else (self.component,)


class SamplerConfig(Strict):
    """How images are drawn: tokens by the AR module, then the DiT's ODE."""

    temperature: float | None = Field(None, gt=0, description="null = the model's own generation_config")
    top_p: float | None = Field(None, gt=0, le=1, description="null = the model's own")
    top_k: int | None = Field(None, ge=0, description="0 = off, null = the model's own")
    steps: int = Field(ge=1, description="denoising steps")
    guidance_scale: float = Field(ge=1, description="classifier-free guidance, 1 = off")
    stochastic: bool = Field(False, description="denoise with the noise of policy.flow, as training samples of the DiT")


class SamplingConfig(Strict):
    rollout: SamplerConfig
    stock: SamplerConfig

    @model_validator(mode="after")
    def _rollout_is_untruncated(self) -> Self:
        r = self.rollout
        if r.top_p != 1 or r.top_k != 0 or r.temperature is None:
            raise ValueError(
                "sampling.rollout must set temperature, top_p: 1 and top_k: 0: a truncated distribution"
                " biases the importance ratio"
            )
        if r.stochastic or self.stock.stochastic:
            raise ValueError("leave stochastic out: the evaluation judges with and without it")
        return self


class RewardConfig(Strict):
    """One reward: a built-in by name or any ``package.module:function``."""

    function: str | None = Field(None, description="package.module:function; null = the built-in of this name")
    weight: float = Field(1.0, description="0 = reported, never optimised")
    dit_weight: float | None = Field(None, description="for the DiT's training; null = the same weight")
    options: dict[str, object] = Field(default_factory=dict, description="keyword arguments of the reward")


class DitGRPOConfig(Strict):
    """What differs for the DiT; null = as for the AR module. Its log-probs are in a unit of their own
    (``policies.flow_sde.log_prob``), in which a clip of 0.2 means what it means for a token."""

    prompts_per_step: int | None = Field(None, ge=1)
    group_size: int | None = Field(None, ge=1, description="decodes of each prompt; joint: of each token sample")
    updates_per_rollout: int | None = Field(None, ge=1)
    micro_batch_size: int | None = Field(None, ge=1)
    learning_rate: float | None = Field(None, gt=0)
    clip_low: float | None = Field(None, gt=0, lt=1)
    clip_high: float | None = Field(None, gt=0)
    kl_weight: float | None = Field(
        None, ge=0, description="weight of the closed-form Gaussian KL, nats a latent element"
    )
    advantage_epsilon: float | None = Field(None, gt=0)


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
    dit: DitGRPOConfig = DitGRPOConfig()

    def of(self, module: Module) -> GRPOConfig:
        """The settings of one module."""
        if module != "dit":
            return self
        own = {name: value for name, value in self.dit.model_dump().items() if value is not None}
        return self.model_copy(update=own)


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
    sampling: SamplingConfig
    rewards: dict[str, RewardConfig] = Field(min_length=1)
    grpo: GRPOConfig
    evaluation: EvaluationConfig
    tracking: TrackingConfig

    @model_validator(mode="after")
    def _records_fit_the_policy(self) -> Self:
        segmentation, vl = self.data.task == "segmentation", self.policy.component == "vl"
        if segmentation != vl:
            raise ValueError(
                "policy.component vl answers queries about images, so it and data.task segmentation go together;"
                f" got policy.component {self.policy.component} with data.task {self.data.task}"
            )
        if self.model.path is None and segmentation != (self.starter.world == "scenes"):
            raise ValueError(
                "the starter's scenes are drawn for data.task segmentation and nothing else is;"
                f" got starter.world {self.starter.world} with data.task {self.data.task}"
            )
        return self

    @model_validator(mode="after")
    def _words_are_no_edits(self) -> Self:
        if self.starter.world == "words" and self.data.task != "t2i" and self.model.path is None:
            raise ValueError(f"starter.world words is drawn for data.task t2i only, got {self.data.task}")
        return self

    @model_validator(mode="after")
    def _groups_can_be_compared(self) -> Self:
        sizes = {module: self.grpo.of(module).group_size for module in self.policy.modules}
        joint = self.policy.component == "both" and self.policy.both == "joint"
        if max(sizes.values()) < 2 or (not joint and min(sizes.values()) < 2):
            raise ValueError(
                f"a group needs at least 2 samples, got {sizes} (grpo.group_size, grpo.dit.group_size);"
                " only a joint rollout may have 1 for one of its modules"
            )
        return self

    @model_validator(mode="after")
    def _window_is_in_the_schedule(self) -> Self:
        steps, flow = self.sampling.rollout.steps, self.policy.flow
        if "dit" in self.policy.modules and not self._window_fits:
            raise ValueError(
                f"policy.flow: the window (window_start {flow.window_start}, window_steps {flow.window_steps}) must end"
                f" before the last of sampling.rollout.steps = {steps} denoising steps, which has no variance:"
                f" at most {steps - 1} steps, 0 to {steps - 2}"
            )
        return self

    @property
    def _window_fits(self) -> bool:
        flow = self.policy.flow
        return (flow.window_start or 0) + (flow.window_steps or 1) <= self.sampling.rollout.steps - 1

    @property
    def judged_samplers(self) -> dict[str, SamplerConfig]:
        """What the evaluation reports, by name: ``rollout`` and ``sde`` as the AR module and the DiT are trained."""
        rollout = self.sampling.rollout
        if self.policy.component == "vl":
            return {"rollout": rollout, "stock": self.sampling.stock}
        sde = {"sde": rollout.model_copy(update={"stochastic": True})} if self._window_fits else {}
        return {"rollout": rollout, **sde, "stock": self.sampling.stock}

    def weights(self, module: Module | None = None) -> dict[str, float]:
        """Each reward's weight for one module's training; None = for judging what ``policy.component`` trains."""
        modules = self.policy.modules if module is None else (module,)
        return {
            name: sum(reward.weight if m != "dit" or reward.dit_weight is None else reward.dit_weight for m in modules)
            / len(modules)
            for name, reward in self.rewards.items()
        }

    @field_validator("rewards", mode="before")
    @classmethod
    def _null_removes(cls, rewards: object) -> object:
        """An environment cannot leave out a reward of conf/base, but it can set it to null."""
        return {k: v for k, v in rewards.items() if v is not None} if isinstance(rewards, dict) else rewards


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"grpo": {"steps": 2}}`` -> ``{"grpo.steps": 2}``."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return flat
