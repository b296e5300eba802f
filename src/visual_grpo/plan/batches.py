"""The largest batches that a card holds, found by running them without values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from visual_grpo.plan.dry_run import DryRunner, records_for
from visual_grpo.policies.rows import repeated
from visual_grpo.policies.token_policy import TokenPolicy


@dataclass(frozen=True)
class Batch:
    """A parameter that says how much is computed at a time."""

    parameter: str
    value: int
    most: int
    """What there is to compute in a step."""
    peak: Callable[[int], int]
    """Bytes when so many are computed at a time."""


def largest(batch: Batch, usable: int) -> int:
    """Doubles or halves what is set as long as it takes at most ``usable`` bytes; 0 where not even one fits."""
    size = min(batch.value, batch.most)
    if batch.peak(size) > usable:
        while size and batch.peak(size) > usable:
            size //= 2
        return size
    while size < batch.most and batch.peak(min(2 * size, batch.most)) <= usable:
        size = min(2 * size, batch.most)
    return size


def batches_of(runner: DryRunner) -> Iterator[Batch]:
    """Needs a step of ``runner`` before."""
    policy, most = runner.config.policy, 0
    for module, own in runner.trainer.modules.items():
        grpo = runner.config.grpo_of(module)
        rows = grpo.prompts_per_step * grpo.group_size
        most = max(most, rows)
        where = f"modules.{module}" if len(runner.trainer.modules) > 1 else "grpo"
        yield Batch(
            f"{where}.micro_batch_size", grpo.micro_batch_size or rows, rows, partial(_replay_peak, runner, module)
        )
        if isinstance(own.policy, TokenPolicy):
            yield Batch("policy.rollout_batch", policy.rollout_batch, rows, partial(_tokens_peak, runner, module))
    if runner.denoised is not None:
        yield Batch("policy.denoise_batch", policy.denoise_batch, most, partial(_denoising_peak, runner))
        yield Batch("policy.decode_batch", policy.decode_batch, most, partial(_pixels_peak, runner))


def _replay_peak(runner: DryRunner, module: str, count: int) -> int:
    own, trajectory, grpo = runner.trainer.modules[module], runner.trajectories[module], runner.config.grpo_of(module)
    rows = torch.arange(count) % (grpo.prompts_per_step * grpo.group_size)
    with runner.counting() as meter:
        for chunk in own.policy.replay(trajectory, rows):
            chunk.log_probs.sum().to(own.device).backward()
        own.optimizer.step()
    own.optimizer.zero_grad(set_to_none=True)
    return meter.peak


def _tokens_peak(runner: DryRunner, module: str, count: int) -> int:
    """With the reference, which has the same rows at a time; a prompt is run once for its group."""
    policy, group = runner.trainer.modules[module].policy, runner.config.grpo_of(module).group_size
    before, policy.config = policy.config, policy.config.model_copy(update={"rollout_batch": count})
    try:
        with records_for(runner.config, -(-count // group)) as prompts, runner.counting() as meter:
            policy.sample(repeated(prompts, group)[:count], 1, torch.Generator().manual_seed(0))
    finally:
        policy.config = before
    return meter.peak


def _denoising_peak(runner: DryRunner, count: int) -> int:
    assert runner.denoised is not None
    denoiser, conditions, schedule, entries = runner.denoised
    with torch.no_grad(), runner.counting() as meter:
        start = denoiser.start_noise(range(count)).to(denoiser.model.transformer.device)
        denoiser.model.velocity(conditions, torch.arange(count) % entries)(start, schedule.timesteps[-1])
    return meter.peak


def _pixels_peak(runner: DryRunner, count: int) -> int:
    assert runner.denoised is not None
    model = runner.denoised[0].model
    with torch.no_grad(), runner.counting() as meter:
        model.pixels(torch.empty(count, *model.latent_shape, device="meta"))
    return meter.peak
