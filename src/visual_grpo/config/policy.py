"""Parameters of the model, of what is trained in it, and of sampling."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from visual_grpo.common.digests import plain_path
from visual_grpo.config.base import BuiltIn, Dtype, NotEmpty, Side, Strict, Words
from visual_grpo.config.decides import Decides


class ModelConfig(Strict, decides=Decides.SAMPLES):
    """The model, and how it is held in memory."""

    family: BuiltIn = Field(
        default="auto",
        description="a built-in family (docs/own_model.md) or package.module:FAMILY; auto = the saved model's",
    )
    path: Annotated[NotEmpty, Decides.CONTENT] = Field(
        description="folder or hub id of a saved model; null = the starter makes a small one"
    )
    revision: str | None = Field(default=None, description="branch, tag or commit of a hub id; null = newest")
    lora: Annotated[NotEmpty | None, Decides.CONTENT] = Field(
        default=None,
        description="a LoRA that is merged into the model as it is loaded, and belongs to the base model from then on:"
        " FILE.safetensors, or OWNER/NAME or OWNER/NAME/FILE.safetensors of the hub",
    )
    dtype: Dtype = Field(
        default="float32", description="precision of the weights; float16 is trained with loss scaling"
    )
    base_weights: Literal["full", "8bit", "4bit"] = Field(
        default="full",
        description="precision of the frozen Linear layers in the networks' blocks (not of the VAE); 8bit and 4bit "
        "(NF4) need make quantised",
    )
    device: Annotated[Words, Decides.SAMPLES | Decides.ROUNDING] = Field(
        default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N"
    )
    offload: Annotated[Literal["none", "phases"], Decides.SAMPLES | Decides.ROUNDING] = Field(
        default="none", description="phases: each network is on the GPU only while it computes; same results"
    )
    attention: Annotated[NotEmpty | dict[str, str] | None, Decides.SAMPLES | Decides.ROUNDING] = Field(
        default=None,
        description="attention backend by diffusers' name (flow modules) or transformers' (sdpa, eager); "
        "model.attention.MODULE=NAME for one of several; null = the library's",
    )
    compile: Annotated[bool, Decides.SAMPLES | Decides.ROUNDING] = Field(
        default=False, description="torch.compile the blocks of the trained networks: minutes once, then faster steps"
    )
    threads: Annotated[int, Decides.SAMPLES | Decides.ROUNDING] = Field(
        default=1, ge=1, le=1024, description="CPU threads of torch; results can differ in their last bits"
    )
    options: dict[str, object] = Field(
        default_factory=dict, description="options of the family, such as max_tokens of qwen2_5_vl"
    )

    @field_validator("path")
    @classmethod
    def _as_one_writes_it_elsewhere(cls, path: str) -> str:
        return plain_path(path)


class LoraParams(Strict, decides=Decides.TRAINING):
    rank: int = Field(default=8, ge=1, le=65536, description="rank of the two matrices added to each target layer")
    alpha: int = Field(default=16, ge=1, description="scale of their product: alpha / rank")
    target_modules: Words | list[Words] | None = Field(
        default=None,
        description="Linear layers that get one: a list of ends of their names, a regular expression of whole names, or"
        " all-linear; null = attention and MLP matrices",
    )


class FlowConfig(Strict, decides=Decides.SAMPLES):
    """The trained decisions of a flow module: stochastic denoising steps, or noise on samples of the ODE (nft, awm)."""

    sampler: Literal["sde", "cps"] = Field(
        default="sde",
        description="transition: of Flow-GRPO (arXiv 2505.05470), or coefficients-preserving (arXiv 2509.05952)",
    )
    noise: float = Field(default=0.7, gt=0, description="noise level a of the transition, for cps at most 1")
    window_start: int | None = Field(
        default=0,
        ge=0,
        description="first stochastic step; null = chosen at random for every rollout, the same for all its samples",
    )
    window_steps: int | None = Field(
        default=1,
        ge=1,
        description="stochastic steps, ODE elsewhere; null = every step but the last, which has no variance. nft, awm:"
        " steps at whose noise levels noise is sampled",
    )
    train_share: float = Field(
        default=1.0, gt=0, le=1, description="share of the stochastic steps that are trained, sampled for every rollout"
    )
    draws: int = Field(
        default=1,
        ge=1,
        description="nft, awm: noise samples at each of the window's noise levels, which the updates of a rollout take"
        " in turn; 1 = the same noise in every update",
    )

    def stochastic_steps(self, steps: int) -> int:
        """Length of the window among ``steps`` denoising steps."""
        return self.window_steps or steps - 1 - (self.window_start or 0)

    def trained_steps(self, window: int) -> int:
        """Number of decisions of a ``window`` that are trained."""
        return max(1, round(self.train_share * window))

    @model_validator(mode="after")
    def _cps_noise_is_an_angle(self) -> Self:
        if self.sampler == "cps" and self.noise > 1:
            raise ValueError(f"noise of the cps sampler is at most 1 (a quarter turn), got {self.noise}")
        return self

    def unread(self, *, forward_process: bool) -> dict[str, object]:
        """Returns the settings that were changed and that the trained decisions do not have, with their defaults."""
        others = ("sampler", "noise") if forward_process else ("draws",)
        defaults = {name: type(self).model_fields[name].default for name in others}
        return {name: value for name, value in defaults.items() if getattr(self, name) != value}


class SignalCheckConfig(Strict, decides=Decides.TRAINING):
    """A check, before the first step, that the policy gradients of independent rollouts agree.

    The run stops where their mean cosine cannot be told from 0 although a useful one would have been.
    """

    rollouts: int | None = Field(
        default=None,
        ge=0,
        description="most rollouts of each module; null = a quarter of grpo.steps, between 6 and 48; 0 = no check; 3 "
        "to 5 stop a run only if every gradient is exactly 0",
    )

    @field_validator("rollouts")
    @classmethod
    def _enough_for_an_error(cls, rollouts: int | None) -> int | None:
        if rollouts in (1, 2):
            raise ValueError("at least 3, since fewer have no standard error and chance would stop the run; 0 = off")
        return rollouts

    def most(self, steps: int) -> int:
        """Rollouts a module at most, before a training of ``steps``."""
        return min(max(steps // 4, 6), 48) if self.rollouts is None else self.rollouts


class PolicyConfig(Strict, decides=Decides.TRAINING):
    """The trained modules, and how their samples are computed."""

    train: Words | list[Words] = Field(
        default="all",
        description="all modules of the model's family, or the names of some: ar, dit (GLM-Image), vl, ...",
    )
    stages: Literal["alternating", "joint"] = Field(
        default="alternating", description="of two modules: a rollout for each in turn, or one rollout that trains both"
    )
    lora: LoraParams = Field(default=LoraParams(), description="LoRA of every module; modules.NAME.lora overrides it")
    flow: FlowConfig = FlowConfig()
    signal_check: SignalCheckConfig = SignalCheckConfig()
    gradient_checkpointing: Annotated[bool, Decides.TRAINING | Decides.ROUNDING] = Field(
        default=False, description="recompute activations in the backward pass: less memory, more time"
    )
    share_start_noise: bool | None = Field(
        default=None,
        description="one start noise of the decoder per prompt; null = true, but with nft and awm, whose samples differ"
        " by it alone",
    )
    decode_guidance_scale: float | None = Field(
        default=None,
        ge=1,
        description="guidance in the pictures of a token module's samples; null = sampling.rollout.guidance_scale",
    )
    denoise_batch: Annotated[int, Decides.SAMPLES | Decides.ROUNDING] = Field(
        default=64, ge=1, description="images denoised at a time (on a CPU by each core)"
    )
    decode_batch: Annotated[int, Decides.SAMPLES | Decides.ROUNDING] = Field(
        default=8, ge=1, description="images decoded by the VAE at a time (on a CPU by each core)"
    )
    rollout_batch: Annotated[int, Decides.SAMPLES | Decides.ROUNDING] = Field(
        default=64, ge=1, description="rows of tokens sampled at a time"
    )

    def shares_start_noise(self, *, forward_process: bool = False) -> bool:
        return not forward_process if self.share_start_noise is None else self.share_start_noise


class TokenSettings(Strict, decides=Decides.SAMPLES):
    """How a token module samples."""

    temperature: float | None = Field(
        default=None, gt=0, description="temperature of the token distribution; null = the model's generation_config"
    )
    top_p: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="share of the probability that tokens are sampled from; null = the model's generation_config",
    )
    top_k: int | None = Field(
        default=None,
        ge=0,
        description="number of most likely tokens to sample from; 0 = all; null = the model's generation_config",
    )


class FlowSettings(Strict, decides=Decides.SAMPLES):
    """How a flow module samples."""

    steps: int | None = Field(default=None, ge=1, description="denoising steps")
    guidance_scale: float | None = Field(default=None, ge=1, description="classifier-free guidance, 1 = off")


class SamplerSettings(FlowSettings, TokenSettings):
    """Settings of a sampler, for modules of both kinds."""


class SamplerConfig(SamplerSettings):
    stochastic: bool = Field(
        default=False, description="denoise with the noise of policy.flow, as for training samples"
    )

    def denoising(self) -> tuple[int, float]:
        """Steps and guidance scale of a flow module; raises ValueError where they are not set."""
        if self.steps is None or self.guidance_scale is None:
            raise ValueError(f"a flow module needs steps and guidance_scale of its sampler, got {self}")
        return self.steps, self.guidance_scale

    def untruncated(self) -> SamplerConfig:
        """Returns the sampler for training samples: of all tokens, at temperature 1 if none is set.

        Raises ValueError where ``top_p`` or ``top_k`` truncates it.
        """
        if self.top_p not in (None, 1) or self.top_k not in (None, 0):
            raise ValueError(
                "sampling.rollout can have no top_p below 1 and no top_k above 0: a truncated distribution biases the"
                " importance ratio"
            )
        temperature = 1.0 if self.temperature is None else self.temperature
        return self.model_copy(update={"temperature": temperature, "top_p": 1.0, "top_k": 0})


class RolloutConfig(SamplerConfig):
    """The sampler of the training samples, and their size where it differs from what is judged."""

    height: Annotated[Side | None, Decides.TRAINING] = Field(
        default=None, description="pixels of training samples; null = data.height"
    )
    width: Annotated[Side | None, Decides.TRAINING] = Field(
        default=None, description="pixels of training samples; null = data.width"
    )
    frames: Annotated[int | None, Decides.TRAINING] = Field(
        default=None, ge=1, description="frames of training samples; null = data.frames"
    )

    def size(self) -> dict[str, int]:
        """Returns ``height``, ``width`` and ``frames`` without those that are None."""
        return self.model_dump(include={"height", "width", "frames"}, exclude_none=True)


class SamplingConfig(Strict):
    rollout: RolloutConfig
    eval: SamplerConfig

    @model_validator(mode="after")
    def _rollout_is_untruncated(self) -> Self:
        self.rollout.untruncated()
        if self.rollout.stochastic or self.eval.stochastic:
            raise ValueError("leave stochastic out: the evaluation judges with and without it")
        return self


class DistributedConfig(Strict, decides=Decides.TRAINING | Decides.ROUNDING):
    """Several processes that train together."""

    processes: int = Field(
        default=1,
        ge=1,
        description="processes that train together, each on a GPU where model.device is cuda; torchrun's number "
        "replaces it; at most grpo.prompts_per_step, since each generates whole groups",
    )
    sharded: bool = Field(default=False, description="each process keeps a part of every layer (torch's FSDP2)")

    @model_validator(mode="before")
    @classmethod
    def _as_torchrun_has_started(cls, section: Any) -> Any:
        if isinstance(section, dict) and "TORCHELASTIC_RUN_ID" in os.environ:
            return section | {"processes": int(os.environ["WORLD_SIZE"])}
        return section

    @model_validator(mode="after")
    def _sharding_needs_processes(self) -> Self:
        if self.sharded and self.processes == 1:
            raise ValueError("sharded needs processes of at least 2, each of which keeps a part of the model")
        return self
