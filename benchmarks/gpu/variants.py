"""What single changes bring on Stable Diffusion 3.5 medium: seconds of one call, one change at a time.

``sampling`` is the guided velocity of a batch without gradient, ``update`` that of a micro-batch forward and backward,
``pictures`` a batch of the VAE. The first line of each is the project as it is configured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from cases import released
from recording import Machine, Recorder, peft_lora, seconds_of, tf32, timed
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile
from torch.utils.flop_counter import FlopCounterMode

from visual_grpo.models.lora_layers import fast_lora
from visual_grpo.operations.plan.dry_run import planned_model, planned_trainer, records_for

BACKENDS = {True: ("_native_flash", "_native_cudnn", "_native_efficient"), False: ("_native_math",)}
"""Is it CUDA? -> diffusers' names of attention backends that torch has."""
SHOWN_KERNELS = 15
COMPILING = 40
"""Seconds that must be left to compile."""
Work = Callable[[], Any]


def run(rows: Recorder, machine: Machine, name: str) -> None:
    bench = Bench(rows, machine, name)
    # What compiles is last: it takes a minute and changes the network.
    for work in (bench.sampling, bench.profile, bench.update, bench.pictures, bench.compiled):
        with rows.guarded(work.__name__):
            work()


class Bench:
    def __init__(self, rows: Recorder, machine: Machine, name: str) -> None:
        self.rows, self.machine = rows, machine
        self.config = released(name, machine)
        planned = planned_model(self.config, measured=True)
        self.trainer = planned_trainer(planned)
        model: Any = planned.model
        self.model, self.network, self.adapter = model.model, model.model.transformer, self.trainer.policy.adapter
        guidance = self.config.sampling.rollout.denoising()[1]
        with records_for(self.config.data, self.config.plan.prompt_words, 1) as records:
            self.conditions = self.model.conditions(records, [0], guidance)
        self.batch, self.micro = self.config.policy.denoise_batch, self.config.grpo.micro_batch_size or 4
        self._first: dict[str, float] = {}

    def sampling(self) -> None:
        with torch.no_grad():
            with fast_lora(self.network):
                self._add("sampling", "as it is: A and B rounded once", self._velocity(self.batch), self.batch)
            self._add("sampling", "as in the window: rounded in each layer", self._velocity(self.batch), self.batch)
            with peft_lora(self.network):
                self._add("sampling", "LoRA in float32", self._velocity(self.batch), self.batch)
            with self.adapter.disabled():
                self._add("sampling", "no adapter", self._velocity(self.batch), self.batch)
            with fast_lora(self.network):
                self._add("sampling", "twice the rows", self._velocity(2 * self.batch), 2 * self.batch)
                self._add("sampling", "both branches in one forward", self._both_branches(self.batch), self.batch)
                for backend in BACKENDS[self.machine.is_cuda]:
                    with self.rows.guarded(backend):
                        self.network.set_attention_backend(backend)
                        self._add("sampling", backend, self._velocity(self.batch), self.batch)
                self.network.set_attention_backend("native")

    def profile(self) -> None:
        """What the device is busy with in a call of ``sampling``."""
        work = self._velocity(self.batch)
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.machine.is_cuda else [])]
        with torch.no_grad(), fast_lora(self.network):
            work()
            with torch_profile(activities=kinds) as found:
                timed(self.machine, work)
        on = DeviceType.CUDA if self.machine.is_cuda else DeviceType.CPU
        spent: Counter[str] = Counter()
        for event in found.events():
            if event.device_type == on:
                spent[event.name[:80]] += event.time_range.elapsed_us()
        self.rows.add("profile of sampling", kernel="all", ms=sum(spent.values()) / 1e3)
        for kernel, microseconds in spent.most_common(SHOWN_KERNELS):
            self.rows.add("profile of sampling", kernel=kernel, ms=microseconds / 1e3)

    def update(self) -> None:
        for checkpointing in (True, False):
            if not checkpointing:
                self.network.disable_gradient_checkpointing()
            kept = "checkpointing" if checkpointing else "no checkpointing"
            self._add("update", f"{kept}, as it is", self._gradient(self.micro), self.micro)
            with peft_lora(self.network):
                self._add("update", f"{kept}: LoRA in float32", self._gradient(self.micro), self.micro)
                with tf32():
                    self._add("update", f"{kept}: LoRA in tf32", self._gradient(self.micro), self.micro)
                half = self._gradient(self.micro, autocast=True)
                self._add("update", f"{kept}: LoRA by autocast", half, self.micro)
            self._add("update", f"{kept}: twice the rows", self._gradient(2 * self.micro), 2 * self.micro)

    def pictures(self) -> None:
        vae, count = self.model.pipeline.vae, self.config.policy.decode_batch
        latents = torch.randn(2 * count, *self.model.latent_shape, device=self.network.device)
        self._add("pictures", "as it is", lambda: self.model.pixels(latents[:count]), count)
        self._add("pictures", "twice the rows", lambda: self.model.pixels(latents), 2 * count)
        vae.to(memory_format=torch.channels_last)
        self._add("pictures", "channels_last", lambda: self.model.pixels(latents[:count]), count)
        vae.to(memory_format=torch.contiguous_format)

    def compiled(self) -> None:
        """Block by block; diffusers' `compile_repeated_blocks` does not know those of Stable Diffusion 3."""
        self.network.disable_gradient_checkpointing()
        for block in self.network.transformer_blocks:
            block.compile(backend="inductor" if self.machine.is_cuda else "aot_eager")  # No minutes of a C++ compiler.
        sampled, updated = torch.no_grad()(self._velocity(self.batch)), self._gradient(self.micro)
        for group, work, count in (("sampling", sampled, self.batch), ("update", updated, self.micro)):
            if self.machine.left() < COMPILING:
                self.rows.add("findings", model="sd3", finding=f"{group}: no time left to compile")
                continue
            torch._dynamo.reset()
            # Blocks of several kinds share their code. Beyond the limit they would run uncompiled, without a word.
            with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
                seconds, _ = timed(self.machine, work)
                self._add(group, f"compiled in {seconds:.0f} s, no checkpointing", work, count)

    def _velocity(self, count: int) -> Work:
        field = self.model.velocity(self.conditions, torch.zeros(count, dtype=torch.long))
        state, timestep = self._state(count), self.model.schedule(2).timesteps[0]
        return lambda: field(state, timestep)

    def _gradient(self, count: int, *, autocast: bool = False) -> Work:
        velocity, device = self._velocity(count), self.network.device.type

        def work() -> None:
            with torch.autocast(device, self.network.dtype) if autocast else nullcontext():
                found = velocity()
            (found.square().mean() * 1e-3).backward()  # Small enough for float16.
            self.trainer.optimizer.zero_grad()

        return work

    def _both_branches(self, count: int) -> Work:
        texts = [self.conditions.negative] * count + [self.conditions.prompts[0]] * count
        state = self._state(count).to(self.network.dtype)
        given = {
            "hidden_states": torch.cat([state, state]),
            "timestep": torch.full((2 * count,), self.model.schedule(2).timesteps[0], device=state.device),
            "encoder_hidden_states": torch.cat([text.embeds for text in texts]),
            "pooled_projections": torch.cat([text.pooled for text in texts]),
        }
        return lambda: self.network(**given, return_dict=False)[0]

    def _state(self, count: int) -> torch.Tensor:
        return torch.randn(count, *self.model.latent_shape, device=self.network.device)

    def _add(self, group: str, what: str, work: Work, count: int) -> None:
        with self.rows.guarded(f"{group}: {what}"):
            with FlopCounterMode(display=False) as counter:
                _, peak = timed(self.machine, work)
            seconds = seconds_of(work)
            first = self._first.setdefault(group, seconds / count)
            rate = counter.get_total_flops() / seconds / 1e12
            row = {"rows": count, "ms": seconds * 1e3, "times_as_fast_a_row": first * count / seconds}
            self.rows.add("single changes", group=group, what=what, **row, tflop_s=rate, gb=peak)
