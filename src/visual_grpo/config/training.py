"""Parameters of training, evaluation and tracking."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from visual_grpo.config.base import REACHES, AdapterName, NotEmpty, Strict
from visual_grpo.config.decides import Decides
from visual_grpo.config.policy import LoraParams, SamplerSettings


class GRPOConfig(Strict, decides=Decides.TRAINING):
    """The algorithm. Token clips are about 0.2 in units of the probability ratio."""

    loss: Literal["grpo", "dr_grpo", "dapo", "gspo", "dppo", "nft", "awm"] = Field(
        default="grpo", description="the algorithm; see grpo/losses.py"
    )
    steps: int = Field(
        ge=1, description="training steps: generate and score samples, then take updates_per_rollout updates"
    )
    prompts_per_step: int = Field(ge=1, description="prompts of a step, a group of samples each")
    group_size: int = Field(ge=2, description="samples of each prompt")
    rollout_prompts: int | None = Field(
        default=None,
        ge=1,
        description="prompts sampled at a time; servers judge them while the next are sampled; null = all",
    )
    updates_per_rollout: int = Field(
        default=1, ge=1, description="optimiser updates on the same samples; 1 = on-policy"
    )
    micro_batch_size: Annotated[int | None, Decides.TRAINING | Decides.ROUNDING] = Field(
        default=None, ge=1, description="rows per backward pass; null = all at once"
    )
    optimizer: Literal["adamw", "adamw_8bit"] = Field(
        default="adamw",
        description="adamw, or adamw_8bit: moments of large matrices in 8 bits (arXiv 2110.02861); needs make "
        "quantised",
    )
    learning_rate: float = Field(gt=0, description="of AdamW, before warm-up and schedule")
    target_kl: float | None = Field(
        default=None,
        gt=0,
        description="KL by which the updates of a step should move the policy, in nats a token (k3) or a latent element"
        " of a denoising step (exact): scales the learning rate, at most to 10 times; null = off",
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.99), description="AdamW's betas"
    )
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's weight decay")
    warmup_steps: int = Field(default=0, ge=0, description="optimiser updates of linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="learning rate after warm-up; linear and cosine fall to 0"
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradients are scaled down to this norm")
    clip_low: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="the ratio is clipped at 1 - clip_low; null = the loss's own (grpo 0.2, awm 1; none: dppo, nft)",
    )
    clip_high: float | None = Field(
        default=None,
        gt=0,
        description="the ratio is clipped at 1 + clip_high; null = the loss's own (dapo 0.28, awm 1; none: dppo, nft)",
    )
    divergence_limit: float | None = Field(
        default=None,
        gt=0,
        description="dppo, in place of the clips: KL of a denoising step to the policy that sampled it, nats a latent"
        " element; null = the loss's own",
    )
    nft_beta: float | None = Field(
        default=None,
        gt=0,
        description="nft: share of the way from the old velocity to the present one at which samples are matched; less"
        " allows larger steps; null = the loss's own (1)",
    )
    average_decay: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="of the average of the trained weights, which samples (nft) or pulls the policy to it (awm): the"
        " share that stays after a rollout rises by .001 an update to this; 0 = the weights of the last rollout; null ="
        " the loss's own (nft .5, awm .3)",
    )
    kl_weight: float = Field(
        default=0.0,
        ge=0,
        description="weight of the KL to the model without adapter: k3, nats a token; of a flow module the exact one,"
        " nats a latent element",
    )
    advantage_scale: Literal["group", "batch", "batch_centred", "none"] | None = Field(
        default=None,
        description="standard deviation that divides advantages: group: of the group's rewards; batch: of all rewards"
        " of the step; batch_centred: of these less their group's mean; none: no division; null = "
        "batch_centred with combine=gdpo, else the loss's own (dr_grpo none, awm batch, all others group)",
    )
    advantage_epsilon: float = Field(
        default=1e-4, gt=0, description="added to the standard deviation, in units of reward"
    )
    advantage_clip: float | None = Field(
        default=None,
        gt=0,
        description="largest absolute advantage; null = 5, and no limit with the scale none, which leaves advantages in"
        " units of reward; the losses nft and awm then have 5, too",
    )
    combine: Literal["sum", "gdpo"] = Field(
        default="sum", description="gdpo: normalise each reward before the weighted sum"
    )
    max_refills: int = Field(
        default=0,
        ge=0,
        description="DAPO's dynamic sampling, with any loss: how often groups without variance are replaced by those"
        " of new prompts",
    )
    non_finite: Annotated[Literal["stop", "skip"], Decides.STOPPING] = Field(
        default="stop",
        description="an update whose loss or gradient is NaN or infinite: stop the run; or skip it, and end the run"
        " after 3 in a row",
    )
    old_log_probs: Literal["auto", "sampler", "replay"] = Field(
        default="auto",
        description="denominator of the ratio: the log-probs of the sampler, or of the first update's forward pass"
        " (replay), which makes the first ratio exactly 1; auto: replay in half precision, where the two round apart;"
        " nft and awm compare velocities, always with the sampler's",
    )
    sampler_correction: float | None = Field(
        default=None,
        gt=0,
        description="with replay: cap of importance weights from the sampler to it (2 is usual), not with nft and awm;"
        " null = none",
    )
    ratio_tolerance: float | None = Field(
        default=None, gt=0, description="largest |log ratio| accepted before the first update; null = the dtype's floor"
    )

    @model_validator(mode="after")
    def _own_parameters_of_losses(self) -> Self:
        for name, losses in (("divergence_limit", ["dppo"]), ("nft_beta", ["nft"]), ("average_decay", ["nft", "awm"])):
            if getattr(self, name) is not None and self.loss not in losses:
                fit = " or ".join(losses)
                raise ValueError(f"{name} is for the loss {fit}, not for {self.loss}: set it to null, or loss to {fit}")
        return self

    def replays(self, dtype: str) -> bool:
        """Returns whether the ratio's denominator is the replay's log-probs, for weights of ``dtype``."""
        if self.old_log_probs == "auto":
            return dtype != "float32"
        return self.old_log_probs == "replay"


class TrainConfig(Strict, decides=Decides.TRAINING):
    """The start of a training, and the weights that are its result."""

    seed: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="seed of the training: initial adapters, order of prompts, rollouts; null = seed",
    )
    start: Annotated[AdapterName, Decides.CONTENT] = Field(
        "base",
        description="base: fresh adapters; champion: the promoted one; one as the parameter adapter names it; or a "
        "LoRA: FILE.safetensors, OWNER/NAME or OWNER/NAME/FILE.safetensors of the hub",
    )
    ema_decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="of an exponential moving average of the adapters over the updates (.9 to .999), which is evaluated"
        " and saved in their place; null = none",
    )
    early_stopping_patience: Annotated[int | None, Decides.STOPPING] = Field(
        None,
        ge=1,
        description="end the training after so many evaluations on eval prompts in a row without a proven gain; null ="
        " never",
    )


class ModuleConfig(Strict, decides=Decides.TRAINING):
    """Overrides for one module of the model; null = as for all.

    A flow module's log-probs are in a unit (``models.flow.transitions.log_prob``) in which a clip of 0.2 means what it
    means for a token.
    """

    prompts_per_step: int | None = Field(None, ge=1, description="as grpo.prompts_per_step")
    group_size: int | None = Field(
        None, ge=2, description="as grpo.group_size; of the second stage in a joint rollout: decodes of each sample"
    )
    updates_per_rollout: int | None = Field(None, ge=1, description="as grpo.updates_per_rollout")
    micro_batch_size: Annotated[int | None, Decides.TRAINING | Decides.ROUNDING] = Field(
        None, ge=1, description="as grpo.micro_batch_size"
    )
    learning_rate: float | None = Field(None, gt=0, description="as grpo.learning_rate")
    target_kl: float | None = Field(None, gt=0, description="as grpo.target_kl")
    clip_low: float | None = Field(None, gt=0, lt=1, description="as grpo.clip_low")
    clip_high: float | None = Field(None, gt=0, description="as grpo.clip_high")
    kl_weight: float | None = Field(None, ge=0, description="as grpo.kl_weight")
    advantage_epsilon: float | None = Field(None, gt=0, description="as grpo.advantage_epsilon")
    lora: LoraParams | None = Field(None, description="as policy.lora, whose values it has where it gives none")
    rewards: Annotated[dict[str, float], Decides.TRAINING | Decides.JUDGEMENT] = Field(
        default_factory=dict, description="weights in this module's training that are not rewards.NAME.weight"
    )

    def grpo(self) -> dict[str, Any]:
        """Returns the values that override the shared `GRPOConfig`."""
        tree = self.model_dump(exclude={"lora", "rewards"})
        return {name: value for name, value in tree.items() if value is not None}


class ControlConfig(SamplerSettings):
    """Settings of the eval sampler that a control changes; null = as the eval sampler has it."""

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if not self.changes():
            raise ValueError("a control sets at least one of " + ", ".join(type(self).model_fields))
        return self

    def changes(self) -> dict[str, float]:
        """The settings that are not null, by name."""
        return self.model_dump(exclude_none=True)


class EvaluationConfig(Strict, decides=Decides.ASKED):
    seed: Annotated[int, Decides.ASKED | Decides.TRAINING] = Field(
        0,
        ge=0,
        lt=2**31,
        description="seed of baseline and evaluation samples and of their intervals, whatever the training's seed",
    )
    every: Annotated[int, Decides.STOPPING] = Field(
        ge=0, description="training steps between evaluations on eval prompts; 0 = only at the end"
    )
    prompts: Annotated[int, Decides.TRAINING] = Field(ge=1, description="eval prompts used while training")
    images_per_prompt: int = Field(
        ge=1,
        description="images of each eval and held-out prompt in baseline and evaluate; at least 2 for a reward that"
        " compares the images of a prompt, which has as many while training",
    )
    max_prompts: int | None = Field(None, ge=1, description="most prompts of each split; null = all")
    batch_size: Annotated[int, Decides.SAMPLES | Decides.ROUNDING] = Field(
        32, ge=1, description="images generated at a time"
    )
    redraw: Annotated[bool, Decides.NOTHING] = Field(
        False, description="generate the baseline again although nothing has changed, as a custom reward may need"
    )
    bootstrap_samples: Annotated[int, Decides.JUDGEMENT] = Field(
        5000, ge=100, description="resamples of the prompts behind each interval of a ratio"
    )
    controls: list[ControlConfig] = Field(
        default_factory=list,
        description="the base model's held-out samples with other settings, as {guidance_scale: 3.0}: a gain that a"
        " setting also gives is not due to training",
    )
    adapter: Annotated[Literal["best", "last"], Decides.TRAINING] = Field(
        "best", description="the adapter of a run: best on eval prompts while training, or the adapter of the last step"
    )


class AlarmConfig(Strict, decides=Decides.STOPPING):
    """Detects a training that cheats its reward: compares it with the base model at every evaluation."""

    action: Literal["warn", "stop", "rollback"] = Field(
        "warn",
        description="warn: log a line, a tag and pictures; stop: also end the training; rollback: end it with the "
        "best adapter before the first alarm with all signals within their limits (else the least suspicious)",
    )
    error: float = Field(
        0.05, gt=0, lt=0.5, description="probability of an alarm in a training in which nothing exceeds its limit"
    )
    max_guard_fall: float = Field(
        0.25, gt=0, description="largest fall of each guard (a reward of weight 0), as a share of the base model's mean"
    )
    max_unscored_rise: float = Field(
        0.05, ge=0, lt=1, description="largest rise of the share of samples that cannot be scored"
    )
    max_distance: float | None = Field(
        None,
        gt=0,
        description="largest distance from the base model's pictures: root mean square of the differences of pixels "
        "in [0, 1], at 64 pixels a side; null = only reported",
    )


class TrackingConfig(Strict, decides=Decides.NOTHING):
    """MLflow is always on; the other loggers are additional."""

    tensorboard: str | None = Field(None, description="folder for TensorBoard's event files; null = none")
    wandb: Annotated[Literal["online", "offline"], REACHES] | None = Field(
        None, description="also log to Weights & Biases; offline: into ./wandb, to be sent later by `wandb sync`"
    )
    checkpoints: NotEmpty = Field(description="folder of checkpoints; null = OUTPUT/06_models/checkpoints")
    checkpoint_every: int = Field(10, ge=1, description="training steps between checkpoints")
    checkpoint_minutes: float = Field(10, ge=0, description="also after so many minutes; 0 = by steps only")
    images_every: int = Field(10, ge=0, description="training steps between sample grids; 0 = none")
    keep_checkpoints: int = Field(2, ge=1, description="newest checkpoints to keep")
