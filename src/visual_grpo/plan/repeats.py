"""What a step does again and again runs a few times only, each of which counts for several.

A token is generated, a denoising step taken and a micro-batch replayed with the same operations on tensors of nearly
the same shapes as the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from visual_grpo.plan.meter import Meter
from visual_grpo.plan.replaced import replaced
from visual_grpo.policies import token_model, token_steps
from visual_grpo.policies.denoising import Denoiser
from visual_grpo.policies.flow_policy import FlowPolicy
from visual_grpo.types import ReplayChunk

_TOKENS = 6


@dataclass(frozen=True, kw_only=True)
class Denoised:
    """What a batch of a denoiser is given."""

    denoiser: Denoiser[Any]
    conditions: Any
    schedule: Any
    entries: int
    """Of the conditions."""


@contextmanager
def fewer_repeats(meter: Meter, seen: Callable[[Denoised], None]) -> Iterator[None]:
    """For generated tokens and denoising, of any model; ``seen`` is called with what is denoised."""
    with ExitStack() as stack:
        decoding = _Decoding(meter)
        stack.enter_context(replaced(token_model, "_sample_batch", decoding.batch))
        stack.enter_context(replaced(token_model, "prefill", decoding.prefill))
        for name in ("layers", "forward"):
            stack.enter_context(replaced(token_steps, name, decoding.step))
        stack.enter_context(replaced(Denoiser, "_ode", lambda real: _two_steps(meter, real, seen)))
        stack.enter_context(replaced(Denoiser, "_batched", lambda real: _one_batch(meter, real)))
        stack.enter_context(replaced(FlowPolicy, "reference_means", lambda real: _one_reference(meter, real)))
        yield


class _Decoding:
    """Of T tokens of a batch only some are generated; what is before the last of them is as long as in a real run."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._length, self._runs, self._done, self._prompt = 0, 0, 0, 0

    def batch(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def sample(model: Any, prompts: Any, prompt_of_row: Tensor, uniforms: Tensor, *rest: Any) -> Any:
            self._length = uniforms.shape[1]
            self._runs, self._done = min(_TOKENS, self._length), 0
            before = self._meter.weight
            try:
                found = real(model, prompts, prompt_of_row, uniforms[:, : self._runs], *rest)
            finally:
                self._meter.weight = before
            return tuple(pad(column, (0, self._length - self._runs)) for column in found)

        return sample

    def prefill(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(model: Any, prompts: Any, prompt_of_row: Tensor) -> Any:
            prefix = real(model, prompts, prompt_of_row)
            self._prompt = prefix.mask.shape[1]
            self._meter.weight *= self._length / self._runs  # Of all that is done for each token after it.
            return prefix

        return run

    def step(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(model: Any, embeds: Tensor, mask: Tensor | None, positions: Any, cache: Any) -> Tensor:
            self._done += 1
            steps, runs = self._length - 1, self._runs - 1
            before = self._prompt + self._done * steps // runs - 1
            _grow(cache, before)
            # None, or [b, 1, 1, all tokens], or [b, all tokens].
            longer = None if mask is None else pad(mask, (0, before + 1 - mask.shape[-1]), value=1)
            with self._meter.weighted(steps / runs * self._runs / self._length):
                hidden: Tensor = real(model, embeds, longer, positions, cache)
            return hidden

        return step


def _grow(cache: Any, length: int) -> None:
    """As long as if every token before had been generated."""
    for layer in cache.layers:
        if layer.keys.shape[2] < length:
            shape = (*layer.keys.shape[:2], length, layer.keys.shape[3])
            layer.keys, layer.values = layer.keys.new_empty(shape), layer.values.new_empty(shape)


def _two_steps(meter: Meter, real: Callable[..., Tensor], seen: Callable[[Denoised], None]) -> Callable[..., Tensor]:
    def ode(self: Any, state: Tensor, conditions: Any, entries: Tensor, schedule: Any, steps: range) -> Tensor:
        seen(Denoised(denoiser=self, conditions=conditions, schedule=schedule, entries=int(entries.max()) + 1))
        # The first step may be less than the others: rows that share their noise share a part of it.
        state = real(self, state, conditions, entries, schedule, steps[:1])
        if len(steps) > 1:
            with meter.weighted(len(steps) - 1):
                state = real(self, state, conditions, entries, schedule, steps[1:2])
        return state

    return ode


def _one_batch(meter: Meter, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def batched(self: Any, state: Tensor, entries: Tensor, run: Any) -> Tensor:
        rows = min(self.denoise_batch, len(state))
        with meter.weighted(len(state) / rows):
            first = real(self, state[:rows], entries[:rows], run)
        return first[torch.arange(len(state)) % rows]

    return batched


def _one_reference(meter: Meter, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def means(self: Any, trajectory: Any) -> Tensor:
        count = len(trajectory.states)
        rows = min(self.config.denoise_batch, count)
        with meter.weighted(count / rows):
            first = real(self, replace(trajectory, states=trajectory.states[:rows]))
        return first[torch.arange(count) % rows]

    return means


@contextmanager
def fewer_micro_batches(meter: Meter, policy: Any, most: int, size: int, seen: Callable[[Any], None]) -> Iterator[None]:
    """Of ``most`` rows of an update, ``size`` in a micro-batch, the first micro-batches run; the others give nothing to
    learn from.

    ``seen`` is called with the trajectory.
    """
    asked, count = 0, -(-most // size)

    def some(real: Callable[..., Iterator[ReplayChunk]]) -> Callable[..., Iterator[ReplayChunk]]:
        def replay(trajectory: Any, rows: Tensor) -> Iterator[ReplayChunk]:
            nonlocal asked
            seen(trajectory)
            number, asked = asked % count, asked + 1
            # So many that one goes forward when there are gradients already: a second one, or a second chunk.
            runs = 1 if len(getattr(trajectory, "steps", ())) > 1 else min(2, count)
            if number < runs:
                each = 1 if count == runs else most / size / runs  # The last one may have fewer rows than these.
                with meter.weighted(each):  # Also while the caller goes backward through a chunk.
                    yield from real(trajectory, rows)

        return replay

    with replaced(policy, "replay", some):
        yield
