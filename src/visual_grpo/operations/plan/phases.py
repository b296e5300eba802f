"""Replaces functions of the project while it is planned or measured: to tell a step's phases apart and, in a plan, to
run only some of their repetitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import pad

from visual_grpo.common.decisions import Likelihoods
from visual_grpo.models.flow.denoising import Denoiser
from visual_grpo.models.flow.policy import FlowPolicy
from visual_grpo.models.tokens import generation
from visual_grpo.models.tokens import policy as token_policy
from visual_grpo.operations.plan.meter import Meter

CONDITIONS = "prompts and conditions"


def replaced(owner: Any, name: str, by: Callable[[Callable[..., Any]], Any]) -> AbstractContextManager[Any]:
    """Puts ``by(owner.name)`` in the place of ``owner.name`` for a while."""
    return patch.object(owner, name, by(getattr(owner, name)))


@contextmanager
def phases_of(phases: Any, trainer: Any = None) -> Iterator[None]:
    """Enters ``phases.phase(name)`` for each phase of sampling and, with ``trainer``, of its whole step.

    Args:
        phases: `Meter` or `gpu_check.Stopwatch`.
    """
    marked: list[tuple[Any, str, str]] = [
        (token_policy, "sample_tokens", "tokens"),
        (Denoiser, "sample_path", "denoising"),
        (Denoiser, "noised_path", "denoising"),
        (Denoiser, "integrate", "denoising"),
        (Denoiser, "pixels", "pictures (VAE)"),
    ]
    if hasattr(getattr(trainer, "policy", None), "joint_rollout"):
        marked.append((trainer.policy, "joint_rollout", CONDITIONS))
    for module, own in {} if trainer is None else trainer.modules.items():
        marked += [
            (own.policy, "rollout", CONDITIONS),
            (own, "update", f"{module}: replay and gradient"),
            (own.optimizer.adamw, "step", f"{module}: AdamW"),
        ]
        references = [name for name in ("reference_log_probs", "reference_means") if hasattr(own.policy, name)]
        marked += [(own.policy, name, f"{module}: reference") for name in references]
    with ExitStack() as stack:
        for owner, function, name in marked:
            # A contextlib context manager is also a decorator, and enters again at each call.
            stack.enter_context(replaced(owner, function, phases.phase(name)))
        yield


@contextmanager
def fewer_repeats(meter: Meter) -> Iterator[None]:
    """Generates two tokens, two denoising steps and one batch, and counts them for all: the others repeat the same
    operations on tensors of nearly the same shapes."""

    def two_steps(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def ode(self: Any, state: Tensor, conditions: Any, entries: Tensor, schedule: Any, steps: range) -> Tensor:
            # The first step may be cheaper: rows that share their noise share a part of it.
            state = real(self, state, conditions, entries, schedule, steps[:1])
            if len(steps) > 1:
                with meter.weighted(len(steps) - 1):
                    state = real(self, state, conditions, entries, schedule, steps[1:2])
            return state

        return ode

    def one_batch(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def batched(self: Any, state: Tensor, entries: Tensor, run: Any) -> Tensor:
            rows = min(self.config.denoise_batch, len(state))
            with meter.weighted(len(state) / rows):
                first = real(self, state[:rows], entries[:rows], run)
            return first[torch.arange(len(state)) % rows]

        return batched

    def one_reference(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def reference_means(self: Any, trajectory: Any) -> Tensor:
            count = len(trajectory.states)
            rows = min(self.config.denoise_batch, count)
            with meter.weighted(count / rows):
                first = real(self, replace(trajectory, states=trajectory.states[:rows]))
            return first[torch.arange(count) % rows]

        return reference_means

    with (
        replaced(generation, "_sample_batch", lambda real: _two_tokens(meter, real)),
        replaced(Denoiser, "_ode", two_steps),
        replaced(Denoiser, "_batched", one_batch),
        replaced(FlowPolicy, "reference_means", one_reference),
    ):
        yield


def _two_tokens(meter: Meter, real: Callable[..., Any]) -> Callable[..., Any]:
    """Generates two tokens with a cache of full length: the peak memory is right, the bytes read are an upper bound."""

    def sample(model: Any, prompts: Any, prompt_of_row: Tensor, uniforms: Tensor, *rest: Any) -> Any:
        length = uniforms.shape[1]
        runs = min(2, length)

        def prefilled(prefill: Callable[..., Any]) -> Callable[..., Any]:
            def run(*given: Any) -> Any:
                prefix = prefill(*given)
                for layer in prefix.cache:  # As if all tokens but the last two had been generated.
                    rows, heads, before, width = layer.keys.shape
                    shape = rows, heads, before + length - runs, width
                    layer.keys, layer.values = layer.keys.new_empty(shape), layer.values.new_empty(shape)
                return replace(prefix, mask=pad(prefix.mask, (0, length - runs), value=1))

            return run

        def started(steps: Callable[..., Any]) -> Callable[..., Any]:
            def start(model: Any, *given: Any) -> Any:
                forward, each = steps(model, *given).next, length / runs
                captured = meter.capturing if generation.can_be_captured(model) else nullcontext
                meter.weight *= each  # From here on all is done for each token, but one forward less.

                def step(embeds: Tensor) -> Tensor:
                    with meter.weighted((length - 1) / (runs - 1) / each), captured():
                        hidden: Tensor = forward(embeds)
                    return hidden

                return SimpleNamespace(next=step)

            return start

        with (
            meter.weighted(1.0),
            replaced(generation, "prefill", prefilled),
            replaced(generation, "token_steps", started),
        ):
            found = real(model, prompts, prompt_of_row, uniforms[:, :runs], *rest)
        return tuple(pad(column, (0, length - runs)) for column in found)

    return sample


@contextmanager
def fewer_micro_batches(meter: Meter, policy: Any, count: int) -> Iterator[None]:
    """Replays the first of ``count`` micro-batches of an update; the others give nothing."""
    asked = 0

    def some(real: Callable[..., Iterator[Likelihoods]]) -> Callable[..., Iterator[Likelihoods]]:
        def replay(trajectory: Any, chosen: Tensor) -> Iterator[Likelihoods]:
            nonlocal asked
            number, asked = asked % count, asked + 1
            # One goes forward when there are gradients already: a second micro-batch, or a second chunk.
            runs = 1 if len(getattr(trajectory, "steps", ())) > 1 else min(2, count)
            if number < runs:
                with meter.weighted(count / runs):  # Also while the caller goes backward through a chunk.
                    yield from real(trajectory, chosen)

        return replay

    with replaced(policy, "replay", some):
        yield
