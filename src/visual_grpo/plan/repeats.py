"""Runs only some of the repetitions of a step and counts each for several.

Tokens, denoising steps and micro-batches repeat the same operations on tensors of nearly the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from visual_grpo.plan.meter import Meter
from visual_grpo.plan.phases import replaced
from visual_grpo.policies import token_model, token_steps
from visual_grpo.policies.denoising import Denoiser
from visual_grpo.types import ReplayChunk

_TOKENS = 6


Denoised = tuple[Denoiser[Any], Any, Any, int]
"""A denoiser with the conditions, the schedule and the number of entries that it was last called with."""


@contextmanager
def fewer_repeats(meter: Meter, seen: Callable[[Denoised], None]) -> Iterator[None]:
    """Shortens sampling of any model; calls ``seen`` with what is denoised."""
    decoding = _Decoding(meter)
    with (
        replaced(token_model, "_sample_batch", decoding.batch),
        replaced(token_model, "prefill", decoding.prefill),
        replaced(token_steps, "layers", decoding.step),
        replaced(Denoiser, "_ode", lambda real: _two_steps(meter, real, seen)),
        replaced(Denoiser, "_batched", lambda real: _one_batch(meter, real)),
    ):
        yield


class _Decoding:
    """Generates a few of T tokens, the last of them after a cache of full length."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._length, self._runs, self._done, self._prompt = 0, 0, 0, 0

    def batch(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def sample(model: Any, prompts: Any, prompt_of_row: Tensor, uniforms: Tensor, *rest: Any) -> Any:
            self._length = uniforms.shape[1]
            self._runs, self._done = min(_TOKENS, self._length), 0
            with self._meter.weighted(1.0):  # Restores the weight that `prefill` sets.
                found = real(model, prompts, prompt_of_row, uniforms[:, : self._runs], *rest)
            return tuple(pad(column, (0, self._length - self._runs)) for column in found)

        return sample

    def prefill(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(model: Any, prompts: Any, prompt_of_row: Tensor) -> Any:
            prefix = real(model, prompts, prompt_of_row)
            self._prompt = prefix.mask.shape[1]
            self._meter.weight *= self._length / self._runs  # For all that is done for each token after it.
            return prefix

        return run

    def step(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(model: Any, embeds: Tensor, mask: Tensor | None, positions: Any, cache: Any) -> Tensor:
            self._done += 1
            steps, runs = self._length - 1, self._runs - 1
            before = self._prompt + self._done * steps // runs - 1
            for layer in cache.layers:  # As long as if every token before had been generated.
                if layer.keys.shape[2] < before:
                    shape = (*layer.keys.shape[:2], before, layer.keys.shape[3])
                    layer.keys, layer.values = layer.keys.new_empty(shape), layer.values.new_empty(shape)
            # None, or [b, 1, 1, all tokens], or [b, all tokens].
            longer = None if mask is None else pad(mask, (0, before + 1 - mask.shape[-1]), value=1)
            with self._meter.weighted(steps / runs * self._runs / self._length):
                hidden: Tensor = real(model, embeds, longer, positions, cache)
            return hidden

        return step


def _two_steps(meter: Meter, real: Callable[..., Tensor], seen: Callable[[Denoised], None]) -> Callable[..., Tensor]:
    def ode(self: Any, state: Tensor, conditions: Any, entries: Tensor, schedule: Any, steps: range) -> Tensor:
        seen((self, conditions, schedule, int(entries.max()) + 1))
        # The first step may be cheaper: rows that share their noise share a part of it.
        state = real(self, state, conditions, entries, schedule, steps[:1])
        if len(steps) > 1:
            with meter.weighted(len(steps) - 1):
                state = real(self, state, conditions, entries, schedule, steps[1:2])
        return state

    return ode


def _one_batch(meter: Meter, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def batched(self: Any, state: Tensor, entries: Tensor, run: Any) -> Tensor:
        rows = min(self.config.denoise_batch, len(state))
        with meter.weighted(len(state) / rows):
            first = real(self, state[:rows], entries[:rows], run)
        return first[torch.arange(len(state)) % rows]

    return batched


@contextmanager
def fewer_micro_batches(meter: Meter, policy: Any, rows: int, size: int, seen: Callable[[Any], None]) -> Iterator[None]:
    """Replays the first of ``rows / size`` micro-batches of an update, the others give nothing; calls ``seen`` with the
    trajectory."""
    asked, count = 0, -(-rows // size)

    def some(real: Callable[..., Iterator[ReplayChunk]]) -> Callable[..., Iterator[ReplayChunk]]:
        def replay(trajectory: Any, chosen: Tensor) -> Iterator[ReplayChunk]:
            nonlocal asked
            seen(trajectory)
            number, asked = asked % count, asked + 1
            # One goes forward when there are gradients already: a second micro-batch, or a second chunk.
            runs = 1 if len(getattr(trajectory, "steps", ())) > 1 else min(2, count)
            if number < runs:
                each = 1 if count == runs else rows / size / runs  # The last one may have fewer rows.
                with meter.weighted(each):  # Also while the caller goes backward through a chunk.
                    yield from real(trajectory, chosen)

        return replay

    with replaced(policy, "replay", some):
        yield
