"""A step of a plain loop in the manner of Flow-GRPO (arXiv 2505.05470), on the weights of a trainer of this project.

The plain loop starts each image from its own noise, runs both branches of guidance in one forward under autocast with
peft's LoRA in float32, takes the KL, where the configuration has one, from a forward without the adapter, and
accumulates gradients over micro-batches.
Prompts, steps and trained steps are the trainer's, and so are the parts that cost the same: it encodes a prompt once,
calls the transformer as the family does, and has the project's formula of the stochastic step. Qwen-Image's branches
run one after the other, since its guidance asks for the norms of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from recording import peft_lora
from torch import Tensor

from visual_grpo.common.types import PromptRecord
from visual_grpo.config import Parameters
from visual_grpo.grpo.advantages import group_advantages
from visual_grpo.models.flow.parts import TextConditions
from visual_grpo.models.flow.transitions import log_prob, ode_step, transition, transition_kl

KL, CLIP = 0.04, 1e-4


class PlainLoop:
    """One step after the other; rows are denoised and go backward in the batches of the configuration."""

    def __init__(self, policy: Any, config: Parameters, records: Sequence[PromptRecord], samples: int) -> None:
        """``samples`` of each record."""
        self.model, self.adapter, self.network = policy.model, policy.adapter, policy.model.transformer
        self.config, self.records = config, records
        self.batch, self.micro = config.policy.denoise_batch, config.grpo.micro_batch_size or samples
        self.entries = torch.arange(len(records)).repeat_interleave(samples)
        self.kl = KL if config.grpo_of("dit").kl_weight else 0.0
        self.advantages = group_advantages(torch.arange(len(self.entries)).float() % 7, samples, scale="batch")
        steps, self.guidance = config.sampling.rollout.denoising()
        self.schedule = self.model.schedule(steps)
        self.trained = range(config.policy.flow.stochastic_steps(steps))
        self.device, self.half = self.network.device, getattr(torch, config.model.dtype)
        self.parameters = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=config.grpo.learning_rate)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.half == torch.float16)
        self.largest_log_ratio = torch.zeros((), device=self.device)

    def step(self) -> None:
        with peft_lora(self.network):
            conditions = self.model.conditions(self.records, range(len(self.records)), self.guidance)
            states, old = self._drawn(conditions)
            for latents in states[-1].split(self.config.policy.decode_batch):
                self.model.pixels(latents)
            self._update(conditions, states, old)

    @torch.no_grad()
    def _drawn(self, conditions: Any) -> tuple[list[Tensor], list[Tensor]]:
        """States before and after each step, each [B, C, ...]; log-probs of the trained steps, each [B]."""
        states = [torch.randn(len(self.entries), *self.model.latent_shape, device=self.device)]
        old = []
        for number in range(len(self.schedule)):
            following, found = [], []
            for rows in torch.arange(len(self.entries)).split(self.batch):
                state = states[-1][rows]
                velocity = self._velocity(state, number, conditions, rows)
                if number in self.trained:
                    mean, std = self._transition(velocity, state, number)
                    following.append(mean + std * torch.randn_like(mean))
                    found.append(log_prob(following[-1], mean, std))
                else:
                    following.append(ode_step(velocity, state, *self.schedule.sigmas[number : number + 2]))
            states.append(torch.cat(following))
            old += [torch.cat(found)] if found else []
        return states, old

    def _update(self, conditions: Any, states: list[Tensor], old: list[Tensor]) -> None:
        count = len(self.entries)
        for number in self.trained:
            for rows in torch.arange(count).split(self.micro):
                state, advantages = states[number][rows], self.advantages[rows].to(self.device)
                mean, std = self._transition(self._velocity(state, number, conditions, rows), state, number)
                log_ratio = log_prob(states[number + 1][rows], mean, std) - old[number][rows]
                ratio = log_ratio.exp()
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                loss = torch.maximum(-advantages * ratio, -advantages * clipped).mean()
                if self.kl:
                    with torch.no_grad(), self.adapter.disabled():
                        base, _ = self._transition(self._velocity(state, number, conditions, rows), state, number)
                    loss = loss + self.kl * transition_kl(mean, base, std).mean()
                self.scaler.scale(loss * len(rows) / count / len(self.trained)).backward()
                self.largest_log_ratio = self.largest_log_ratio.maximum(log_ratio.detach().abs().max())
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def _velocity(self, state: Tensor, number: int, conditions: Any, rows: Tensor) -> Tensor:
        entries, timestep = self.entries[rows], self.schedule.timesteps[number]
        with torch.autocast(self.device.type, self.half):
            if not isinstance(conditions, TextConditions) or conditions.negative is None:
                return self.model.velocity(conditions, entries)(state, timestep).float()
            field = self.model.velocity(one_forward(conditions), torch.cat([0 * entries, 1 + entries]))
            away, towards = field(torch.cat([state, state]), timestep).float().chunk(2)
        return away.detach() + self.guidance * (towards - away.detach())

    def _transition(self, velocity: Tensor, state: Tensor, number: int) -> tuple[Tensor, float]:
        sigma, following = self.schedule.sigmas[number : number + 2]
        return transition(velocity, state, sigma, following, self.config.policy.flow.noise, "sde")


def one_forward(conditions: TextConditions[Any]) -> TextConditions[Any]:
    """The negative prompt as the first entry, without guidance."""
    return replace(
        conditions,
        prompts=[conditions.negative, *conditions.prompts],
        negative=None,
        references=[*conditions.references[:1], *conditions.references],
    )
