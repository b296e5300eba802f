"""Steps of a training on the GPU, each phase timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from visual_grpo import components
from visual_grpo.config import Parameters
from visual_grpo.gpu_check.host_waits import counted_waits
from visual_grpo.gpu_check.model import check_model
from visual_grpo.gpu_check.stopwatch import Stopwatch
from visual_grpo.hardware.device import resolve_device
from visual_grpo.plan.inputs import REWARD, records_for, unequal_scores, with_planned_reward
from visual_grpo.plan.models import of_loaded
from visual_grpo.plan.phases import phases_of_drawing, phases_of_training
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.types import PromptRecord, Sample, StepMetrics

_KEPT = ("ratio/", "sampler_gap/", "grad_norm", "loss", "kl", "entropy", "tokens_per_sample", "approx_kl")
"""Starts of the metrics that are reported."""


def measure(config: Parameters) -> dict[str, Any]:
    """As JSON. ``config``: of `Case.configured`; the model is loaded, or made with random weights.

    The last step is timed, the one before it (or it itself) tells where the host waits. The trainer's own check of the
    first ratios runs as in any training, and raises what it raises there.
    """
    device = resolve_device(config.model.device)
    torch.set_num_threads(config.model.threads)
    torch.manual_seed(config.seed)
    config, started = with_planned_reward(config), time.perf_counter()
    family, loaded, source = check_model(config, device)
    planned = of_loaded(config, family, loaded, source)
    scorer = RewardSet({REWARD: (_scores, 1.0)})
    trainer: Any = components.build_trainer(config, planned.plan, planned.model, scorer)
    facts = {"source": source, "loading_seconds": time.perf_counter() - started, "weights_gb": _allocated(device)}
    with records_for(config, config.grpo.prompts_per_step) as records:
        return facts | _steps(trainer, records, config.grpo.steps, device)


def _steps(trainer: Any, records: Sequence[PromptRecord], count: int, device: torch.device) -> dict[str, Any]:
    steps = trainer.fit(records)
    found: list[StepMetrics] = []
    waits: dict[str, int] = {}
    for number in range(1, count + 1):
        with ExitStack() as stack:
            counted = stack.enter_context(counted_waits(device)) if number == max(count - 1, 1) else None
            watch = Stopwatch(device)
            stack.enter_context(phases_of_drawing(watch))
            stack.enter_context(phases_of_training(watch, trainer))
            found.append(next(steps))
            watch.stop()
        waits = waits if counted is None else dict(counted.most_common())
    return {
        "phases": {name: {"seconds": row.seconds, "peak_gb": row.peak / 1e9} for name, row in watch.phases.items()},
        "step_seconds": watch.seconds,
        "peak_gb": watch.peak / 1e9,
        "host_waits": waits,
        "metrics": [{name: value for name, value in step.values.items() if name.startswith(_KEPT)} for step in found],
        "samples": len(found[-1].samples),
        "tokens_per_sample": found[-1].values.get("tokens_per_sample"),
    }


def _scores(prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> Tensor:
    return unequal_scores(len(samples))


def _allocated(device: torch.device) -> float:
    return torch.cuda.memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0
