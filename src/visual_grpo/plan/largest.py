"""The largest batches that a card can hold, found by running them without values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from visual_grpo.plan.dry_run import DryRunner
from visual_grpo.plan.inputs import records_for
from visual_grpo.policies.rows import repeated
from visual_grpo.policies.token_policy import TokenPolicy

_FULL = 0.97
"""Of the card, with which a search ends."""
_CLOSE = 16
"""A search ends, too, where a sixteenth more does not fit."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One parameter that says how much is computed at a time."""

    parameter: str
    value: int
    """As it is set, at most what there is to compute in a step."""
    most: int
    """What there is to compute in a step: more at a time is no more."""
    peak: Callable[[int], int]
    """Bytes at the most when so many are computed at a time."""


@dataclass(frozen=True, kw_only=True)
class LargestBatch:
    parameter: str
    value: int
    largest: int
    """0 = not even one fits."""
    peak: int
    """Bytes with the largest, or with one."""


def largest(batch: Batch, usable: int) -> LargestBatch:
    """``usable``: bytes that tensors may take.

    Memory grows about evenly with the batch, so that two sizes tell a third; which is then run itself. It grows
    unevenly where a row more is a prompt more, or where the peak moves to another operation: then the search goes on
    between what fits and what does not, until the card is nearly full.
    """
    peaks = {1: batch.peak(1)}
    if peaks[1] > usable:
        return LargestBatch(parameter=batch.parameter, value=batch.value, largest=0, peak=peaks[1])
    fitting, too_many, size = 1, batch.most + 1, 2
    while too_many - fitting > max(1, fitting // _CLOSE) and (fitting < 3 or peaks[fitting] < _FULL * usable):
        size = min(max(size, fitting + 1), too_many - 1)
        peaks[size] = batch.peak(size)
        if peaks[size] <= usable:
            fitting = size
        else:
            too_many = size
        size = (fitting + too_many) // 2 if len(peaks) % 2 else _by_the_last_two(peaks, usable)
    return LargestBatch(parameter=batch.parameter, value=batch.value, largest=fitting, peak=peaks[fitting])


def _by_the_last_two(peaks: Mapping[int, int], usable: int) -> int:
    """The size that takes ``usable`` bytes if memory goes on to grow as between the two sizes that were asked last."""
    before, last = list(peaks)[-2:]
    each = max((peaks[last] - peaks[before]) / (last - before), 1)
    return int(last + (usable - peaks[last]) // each)


def batches_of(runner: DryRunner) -> Iterator[Batch]:
    """After a step of ``runner``."""
    config, rows_of = runner.config, {}
    for module, trainer in runner.trainer.modules.items():
        grpo = config.grpo_of(module)
        rows = rows_of[module] = grpo.prompts_per_step * grpo.group_size
        own = config.modules.get(module)
        apart = len(runner.trainer.modules) > 1 or (own is not None and own.micro_batch_size is not None)
        where = f"modules.{module}" if apart else "grpo"
        value = min(grpo.micro_batch_size or rows, rows)
        yield Batch(parameter=f"{where}.micro_batch_size", value=value, most=rows, peak=_replay_peak(runner, module))
        if isinstance(trainer.policy, TokenPolicy):
            value = min(config.policy.rollout_batch, rows)
            yield Batch(
                parameter="policy.rollout_batch",
                value=value,
                most=rows,
                peak=_tokens_peak(runner, module, trainer.policy),
            )
    if runner.denoised is not None:
        most, policy = max(rows_of.values()), config.policy
        for name, peak in (("denoise_batch", _denoising_peak(runner)), ("decode_batch", _pixels_peak(runner))):
            value = min(getattr(policy, name), most)
            yield Batch(parameter=f"policy.{name}", value=value, most=most, peak=peak)


def _replay_peak(runner: DryRunner, module: str) -> Callable[[int], int]:
    def peak(count: int) -> int:
        own, trajectory = runner.trainer.modules[module], runner.trajectories[module]
        grpo = runner.config.grpo_of(module)
        rows = torch.arange(count) % (grpo.prompts_per_step * grpo.group_size)
        with runner.counting() as meter:
            for chunk in own.policy.replay(trajectory, rows):
                chunk.log_probs.sum().to(own.device).backward()
            own.optimizer.step()
        own.optimizer.zero_grad(set_to_none=True)
        return meter.peak

    return peak


def _tokens_peak(runner: DryRunner, module: str, policy: TokenPolicy) -> Callable[[int], int]:
    """With the reference, which has the same rows at a time; a prompt is run once for its group."""
    group = runner.config.grpo_of(module).group_size

    def peak(count: int) -> int:
        config = policy.config.model_copy(update={"rollout_batch": count})
        before, policy.config = policy.config, config
        try:
            with records_for(runner.config, -(-count // group)) as prompts, runner.counting() as meter:
                rows = repeated(prompts, group)[:count]
                policy.sample(rows, 1, torch.Generator().manual_seed(0))
        finally:
            policy.config = before
        return meter.peak

    return peak


def _denoising_peak(runner: DryRunner) -> Callable[[int], int]:
    def peak(count: int) -> int:
        denoised = runner.denoised
        assert denoised is not None
        denoiser, schedule = denoised.denoiser, denoised.schedule
        entries = torch.arange(count) % denoised.entries
        with torch.no_grad(), runner.counting() as meter:
            start = denoiser.start_noise(range(count)).to(denoiser.model.transformer.device)
            denoiser.model.velocity(denoised.conditions, entries)(start, schedule.timesteps[-1])
        return meter.peak

    return peak


def _pixels_peak(runner: DryRunner) -> Callable[[int], int]:
    def peak(count: int) -> int:
        assert runner.denoised is not None
        model = runner.denoised.denoiser.model
        with torch.no_grad(), runner.counting() as meter:
            model.pixels(torch.empty(count, *model.latent_shape, device="meta"))
        return meter.peak

    return peak
