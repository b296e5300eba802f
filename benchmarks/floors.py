"""A minimal reference implementation of a training step, as a lower bound (floor) on its CPU time.

Sampling runs in one batch; an update is one forward and backward pass of the trained module.
Nothing is shared within a group, checked or recorded. Shapes: B rows, T tokens, C x h x w latents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from phases import Seconds, phase
from torch import Tensor, nn

from visual_grpo.common.types import PromptRecord, Rollout
from visual_grpo.config import GRPOConfig, SamplerConfig
from visual_grpo.grpo.losses import clipped_surrogate, importance_ratio, k3_kl
from visual_grpo.models.families.glm_image.decoder import DecoderConditions
from visual_grpo.models.families.glm_image.model import GlmImage
from visual_grpo.models.flow.flow_policy import FlowPolicy, FlowTrajectory
from visual_grpo.models.flow.transitions import log_prob, ode_step, transition
from visual_grpo.models.lora_layers import fast_lora
from visual_grpo.models.tokens.interface import TokenTrajectory
from visual_grpo.models.tokens.prompt_cache import Prompts
from visual_grpo.models.tokens.token_policy import TokenPolicy

ArPolicy = TokenPolicy[Prompts]
DitPolicy = FlowPolicy[DecoderConditions]


def ar_floor(image: GlmImage, policy: ArPolicy, config: GRPOConfig, records: list[PromptRecord]) -> Seconds:
    """One ``generate`` with KV cache, one pipeline call, and for every update one forward and backward of prompt and
    tokens."""
    seconds: Seconds = {}
    rows = [record for record in records for _ in range(config.group_size)]
    with phase(seconds, "tokens"):
        generate(image, rows, policy.sampler)
    rollout = policy.rollout(records, config.group_size, torch.Generator().manual_seed(0))
    with phase(seconds, "decode"):
        decode_by_pipeline(image, rows, rollout.trajectory.tokens, policy.sampler)
    reference = None
    if policy.kl_reference:
        with phase(seconds, "reference"), torch.no_grad(), policy.adapter.disabled():
            reference = _whole_log_probs(policy, rollout.trajectory)
    for _ in range(config.updates_per_rollout):
        with phase(seconds, "updates"):
            _update_ar(policy, rollout, reference)
    return seconds


def dit_floor(
    image: GlmImage, policy: DitPolicy, tokens_by: SamplerConfig, config: GRPOConfig, records: list[PromptRecord]
) -> Seconds:
    """One ``generate`` as ``tokens_by`` says, the forward passes of the denoising, VAE decoding, and for every update a
    forward and backward of every trained step, with the unconditional branch without gradient."""
    seconds: Seconds = {}
    with phase(seconds, "tokens"):
        generate(image, records, tokens_by)
    trajectory = policy.rollout(records, config.group_size, torch.Generator().manual_seed(0)).trajectory
    with phase(seconds, "denoising"), torch.no_grad(), fast_lora(image.pipeline.transformer):
        flow = BareFlow.of(image, policy, records, trajectory)
        latents = flow.integrate(policy.denoiser.start_noise(range(len(flow.tokens))))
    with phase(seconds, "pixels"), torch.no_grad():
        _pixels(image, latents)
    if policy.kl_reference:
        with phase(seconds, "reference"), torch.no_grad(), policy.adapter.disabled():
            for column, step in enumerate(trajectory.steps):
                flow.velocity(trajectory.states[:, column], step)
    for _ in range(config.updates_per_rollout):
        with phase(seconds, "updates"):
            update_dit(policy, flow, trajectory)
    return seconds


@torch.no_grad()
def generate(image: GlmImage, rows: Sequence[PromptRecord], sampler: SamplerConfig) -> None:
    """Generates all tokens of ``rows`` with the model's batched ``generate`` with KV cache."""
    tokens = image.tokens(sampler)
    inputs = tokens.processed(rows)
    preview, (height, width) = tokens.grid(sources=0)
    count = preview + height * width
    drawn_from = tokens.sampler(sampler)
    model = image.pipeline.vision_language_encoder.eval()
    with fast_lora(model):
        model.generate(
            **inputs,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=True,
            temperature=drawn_from.temperature,
            top_p=drawn_from.top_p,
            top_k=drawn_from.top_k,
        )


@torch.no_grad()
def decode_by_pipeline(image: GlmImage, rows: Sequence[PromptRecord], tokens: Tensor, sampler: SamplerConfig) -> None:
    """Decodes [B, T] tokens to pixels with the pipeline's ``__call__``: ODE and VAE, each in one batch."""
    with fast_lora(image.pipeline.transformer):
        image.pipeline(
            prompt=[record.prompt for record in rows],
            prior_token_ids=_upsampled(image, sampler, tokens),
            height=image.size[0],
            width=image.size[1],
            num_inference_steps=sampler.steps,
            guidance_scale=sampler.guidance_scale,
            output_type="np",
        )


def update_dit(
    policy: DitPolicy,
    flow: BareFlow,
    trajectory: FlowTrajectory[DecoderConditions],
    *,
    unconditional_gradient: bool = False,
) -> None:
    """Forward and backward of every trained step of all rows."""
    settings, sigmas = policy.config.flow, trajectory.schedule.sigmas
    for column, step in enumerate(trajectory.steps):
        state, sample = trajectory.states[:, column], trajectory.next_states[:, column]
        velocity = flow.velocity(state, step, unconditional_gradient=unconditional_gradient)
        mean, std = transition(velocity, state, sigmas[step], sigmas[step + 1], settings.noise, settings.sampler)
        old = log_prob(sample, trajectory.means[:, column], std)
        _surrogate(log_prob(sample, mean, std)[:, None], old[:, None]).backward()
    _drop_gradients(policy.trainable_parameters())


@dataclass(frozen=True, kw_only=True)
class BareFlow:
    """The DiT's forward passes for B rows without quoted text, with all step-independent inputs prepared once."""

    transformer: Any
    timesteps: Sequence[float]
    sigmas: Sequence[float]
    glyphs: tuple[Tensor, Tensor]
    """[B, L, D] of the prompts, and of the empty prompt for the unconditional branch."""
    tokens: Tensor
    """[B, h * w / 4] int64."""
    target_size: Tensor
    """[B, 2] height and width in pixels."""
    guidance_scale: float

    @classmethod
    def of(
        cls,
        image: GlmImage,
        policy: DitPolicy,
        records: Sequence[PromptRecord],
        trajectory: FlowTrajectory[DecoderConditions],
    ) -> BareFlow:
        """Prepares the rows of ``trajectory``; each of its ``records`` is encoded once."""
        tokens = trajectory.conditions.tokens[trajectory.entries]
        encode = image.pipeline.encode_prompt
        glyphs = encode([record.prompt for record in records], do_classifier_free_guidance=False)[0]
        no_glyphs = encode("", do_classifier_free_guidance=False)[0]
        return cls(
            transformer=image.pipeline.transformer,
            timesteps=trajectory.schedule.timesteps,
            sigmas=trajectory.schedule.sigmas,
            glyphs=(glyphs.repeat_interleave(len(tokens) // len(records), 0), no_glyphs.expand(len(tokens), -1, -1)),
            tokens=tokens,
            target_size=torch.tensor([image.size], dtype=glyphs.dtype).expand(len(tokens), -1),
            guidance_scale=policy.guidance_scale,
        )

    def integrate(self, state: Tensor) -> Tensor:
        """Integrates the ODE from start noise to latents, both [B, C, h, w]; SDE steps need equally many passes."""
        for step in range(len(self.timesteps)):
            state = ode_step(self.velocity(state, step), state, self.sigmas[step], self.sigmas[step + 1])
        return state

    def velocity(self, state: Tensor, step: int, *, unconditional_gradient: bool = False) -> Tensor:
        """Velocity [B, C, h, w] with classifier-free guidance."""
        conditional = self._forward(state, step, self.glyphs[0], dropped=False)
        if self.guidance_scale <= 1:
            return conditional
        with torch.set_grad_enabled(unconditional_gradient):
            unconditional = self._forward(state, step, self.glyphs[1], dropped=True)
        return unconditional + self.guidance_scale * (conditional - unconditional)

    def _forward(self, state: Tensor, step: int, glyphs: Tensor, *, dropped: bool) -> Tensor:
        velocity: Tensor = self.transformer(
            hidden_states=state,
            encoder_hidden_states=glyphs,
            prior_token_id=self.tokens,
            prior_token_drop=torch.full_like(self.tokens, dropped, dtype=torch.bool),
            timestep=torch.full((len(state),), self.timesteps[step] - 1),
            target_size=self.target_size,
            crop_coords=torch.zeros_like(self.target_size),
            return_dict=False,
        )[0]
        return velocity


def _update_ar(policy: ArPolicy, rollout: Rollout[TokenTrajectory[Prompts]], reference: Tensor | None) -> None:
    log_probs = _whole_log_probs(policy, rollout.trajectory)
    loss = _surrogate(log_probs, rollout.log_probs)
    if reference is not None:
        loss = loss + 0.01 * k3_kl(log_probs, reference).mean()
    loss.backward()
    _drop_gradients(policy.trainable_parameters())


def _whole_log_probs(policy: ArPolicy, trajectory: TokenTrajectory[Prompts]) -> Tensor:
    """Log-probs [B, T] by one forward pass of every row's prompt and tokens."""
    model, prompts, own, tokens = policy.model, trajectory.prompts, trajectory.prompt_of_row, trajectory.tokens
    count = tokens.shape[1]
    embeds = torch.cat([prompts.embeds[own], model.network.model.get_input_embeddings()(tokens[:, :-1])], 1)
    mask = torch.cat([prompts.mask[own], torch.ones_like(tokens[:, :-1])], 1)
    positions = torch.cat([prompts.positions[:, own], prompts.token_positions[:, own, : count - 1]], 2)
    language_model = model.network.model.language_model
    output = language_model(inputs_embeds=embeds, attention_mask=mask, position_ids=positions, use_cache=False)
    hidden = output.last_hidden_state[:, -count:]
    return (hidden @ model.head.t()).log_softmax(-1).gather(2, trajectory.tokens[..., None])[..., 0]


def _surrogate(log_probs: Tensor, old: Tensor) -> Tensor:
    """Scalar loss of [B, S] log-probs with arbitrary advantages."""
    advantages = torch.linspace(-1, 1, len(log_probs))
    return clipped_surrogate(importance_ratio(log_probs - old), advantages, 0.2, 0.2).mean()


def _drop_gradients(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _pixels(image: GlmImage, latents: Tensor) -> None:
    """Decodes [B, C, h, w] to pixels, ``decode_batch`` images at a time: a single batch takes 1.5 times as long."""
    vae = image.pipeline.vae
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std))
    for part in (latents * std + mean).contiguous(memory_format=torch.channels_last).split(image.config.decode_batch):
        image.pipeline.image_processor.postprocess(vae.decode(part, return_dict=False)[0], output_type="pt")


def _upsampled(image: GlmImage, sampler: SamplerConfig, tokens: Tensor) -> Tensor:
    """[B, T] -> [B, h * w / 4]: the tokens of the large grid, upsampled by 2 in both directions."""
    preview, size = image.tokens(sampler).grid(sources=0)
    large = tokens[:, preview:].view(-1, *size)
    return large.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)
