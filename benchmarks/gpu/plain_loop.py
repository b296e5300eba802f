"""A step of Stable Diffusion 3.5 medium beside one of a plain loop in the manner of Flow-GRPO (arXiv 2505.05470).

The plain loop encodes each prompt once for every image, starts each image from its own noise, runs both branches of
guidance in one forward under autocast with peft's LoRA in float32, takes the KL from a forward without the adapter, and
accumulates gradients over micro-batches. Both have the same weights, LoRA, prompts, steps and trained steps, on one
device and in turns; the formula of the stochastic step is the project's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cases import released
from recording import Machine, Recorder, peft_lora, timed
from torch import Tensor

from visual_grpo.config import Parameters
from visual_grpo.grpo.losses import group_advantages
from visual_grpo.grpo.sampling import PromptOrder
from visual_grpo.models.flow.transitions import log_prob, ode_step, transition, transition_kl
from visual_grpo.operations.plan.dry_run import planned_model, planned_trainer, records_for

KL, CLIP = 0.04, 1e-4


class PlainLoop:
    """One step after the other; ``batch`` rows are denoised at a time, ``micro`` rows go backward."""

    def __init__(self, policy: Any, config: Parameters, records: Any, *, batch: int, micro: int) -> None:
        model, self.adapter = policy.model, policy.adapter
        self.pipeline, self.network = model.pipeline, model.transformer
        self.config, self.batch, self.micro = config, batch, micro
        group = config.grpo.group_size
        self.texts = [record.prompt for record in records for _ in range(group)]
        rewards = torch.arange(len(self.texts), dtype=torch.float32) % 7
        self.advantages = group_advantages(rewards, group, scale="batch")
        self.shape = (len(self.texts), *model.latent_shape)
        steps, self.guidance = config.sampling.rollout.denoising()
        self.schedule = model.schedule(steps)
        self.trained = range(config.policy.flow.stochastic_steps(steps))
        self.device, self.half = self.network.device, getattr(torch, config.model.dtype)
        self.parameters = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=config.grpo.learning_rate)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.half == torch.float16)
        self.largest_log_ratio = torch.zeros((), device=self.device)

    def step(self) -> None:
        with peft_lora(self.network):
            self._step()

    def _step(self) -> None:
        texts = self._encoded()
        states, old = self._drawn(texts)
        with torch.no_grad():
            vae = self.pipeline.vae
            for latents in states[-1].split(self.config.policy.decode_batch):
                latents = latents / vae.config.scaling_factor + vae.config.shift_factor
                vae.decode(latents.to(vae.dtype), return_dict=False)[0].cpu()
        self._update(texts, states, old)

    def _encoded(self) -> tuple[Tensor, Tensor]:
        """Embeddings [2, B, L, D] and pooled ones [2, B, P], the unconditional half first."""
        length = self.config.model.options.get("max_sequence_length", 256)
        with torch.no_grad():
            embeds, negative, pooled, negative_pooled = self.pipeline.encode_prompt(
                self.texts, None, None, do_classifier_free_guidance=True, max_sequence_length=length
            )
        return torch.stack([negative, embeds]), torch.stack([negative_pooled, pooled])

    def _drawn(self, texts: tuple[Tensor, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """States before and after each step, each [B, C, h, w]; log-probs of the trained steps, each [B]."""
        states, old = [torch.randn(self.shape, device=self.device)], []
        for number in range(len(self.schedule)):
            following, found = [], []
            for rows in torch.arange(self.shape[0]).split(self.batch):
                state = states[-1][rows]
                with torch.no_grad():
                    velocity = self._velocity(state, number, texts, rows)
                if number in self.trained:
                    mean, std = self._transition(velocity, state, number)
                    following.append(mean + std * torch.randn_like(mean))
                    found.append(log_prob(following[-1], mean, std))
                else:
                    following.append(ode_step(velocity, state, *self.schedule.sigmas[number : number + 2]))
            states.append(torch.cat(following))
            old += [torch.cat(found)] if found else []
        return states, old

    def _update(self, texts: tuple[Tensor, Tensor], states: list[Tensor], old: list[Tensor]) -> None:
        count = self.shape[0]
        for number in self.trained:
            for rows in torch.arange(count).split(self.micro):
                state, advantages = states[number][rows], self.advantages[rows].to(self.device)
                mean, std = self._transition(self._velocity(state, number, texts, rows), state, number)
                with torch.no_grad(), self.adapter.disabled():
                    base, _ = self._transition(self._velocity(state, number, texts, rows), state, number)
                log_ratio = log_prob(states[number + 1][rows], mean, std) - old[number][rows]
                ratio = log_ratio.exp()
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                loss = torch.maximum(-advantages * ratio, -advantages * clipped).mean()
                loss = (loss + KL * transition_kl(mean, base, std).mean()) * len(rows) / count / len(self.trained)
                self.scaler.scale(loss).backward()
                self.largest_log_ratio = self.largest_log_ratio.maximum(log_ratio.detach().abs().max())
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def _velocity(self, state: Tensor, number: int, texts: tuple[Tensor, Tensor], rows: Tensor) -> Tensor:
        embeds, pooled = (part[:, rows].flatten(0, 1) for part in texts)
        with torch.autocast(self.device.type, self.half):
            both = self.network(
                hidden_states=torch.cat([state, state]).to(self.half),
                timestep=torch.full((2 * len(rows),), self.schedule.timesteps[number], device=self.device),
                encoder_hidden_states=embeds,
                pooled_projections=pooled,
                return_dict=False,
            )[0]
        away, towards = both.float().chunk(2)
        return away.detach() + self.guidance * (towards - away.detach())

    def _transition(self, velocity: Tensor, state: Tensor, number: int) -> tuple[Tensor, float]:
        sigma, following = self.schedule.sigmas[number : number + 2]
        return transition(velocity, state, sigma, following, self.config.policy.flow.noise, "sde")


def run(rows: Recorder, machine: Machine, name: str) -> None:
    """In turns: ours and the plain loop with our batches, then the plain loop with large ones."""
    config = released(name, machine)
    lenient = config.grpo.model_copy(update={"ratio_tolerance": 1e9, "non_finite": "skip"})  # The weights are random.
    trainer = planned_trainer(planned_model(config.model_copy(update={"grpo": lenient}), measured=True))
    group, policy = config.grpo.group_size, config.policy
    spent: dict[str, float] = {}
    ours = {"batch": policy.denoise_batch, "micro": config.grpo.micro_batch_size or group}
    with records_for(config.data, config.plan.prompt_words, config.grpo.prompts_per_step) as records:

        def step() -> None:
            trainer.take_step(records, PromptOrder(records, trainer.seed))

        def plain(label: str, **sizes: int) -> None:
            with rows.guarded(label):
                loop = PlainLoop(trainer.policy, config, records, **sizes)
                add(label, loop.step, **sizes)
                rows.add("plain loop's ratios", loop=label, largest_log_ratio=float(loop.largest_log_ratio))

        def add(label: str, work: Callable[[], None], **sizes: int) -> None:
            if label not in spent:
                work()  # Libraries choose their kernels.
            seconds, peak = timed(machine, work)
            first = spent.setdefault("ours", seconds)
            rows.add(
                "steps beside a plain loop", loop=label, seconds=seconds, of_ours=seconds / first, gb=peak, **sizes
            )

        for _ in range(2):
            add("ours", step, **ours)
            plain("plain, our batches", **ours)
        trainer.policy.model.transformer.disable_gradient_checkpointing()
        plain("plain, all rows at a time, no checkpointing", batch=group, micro=min(group, 6))
