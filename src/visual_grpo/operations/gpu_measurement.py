"""Measures steps of a training on a GPU: time and memory of each phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from visual_grpo.common.device import resolve_device
from visual_grpo.common.phases import Watcher, watched_by
from visual_grpo.config import Parameters, merged
from visual_grpo.operations.plan.dry_run import planned_model, planned_trainer, records_for
from visual_grpo.operations.plan.estimate import CARDS
from visual_grpo.operations.plan.meter import OUTSIDE, Phase

_KEPT = ("ratio/", "sampler_gap/", "grad_norm", "loss", "tokens_per_sample")
"""Beginnings of the metrics that are reported."""


def measure(config: Parameters) -> dict[str, Any]:
    """Returns JSON; seconds and memory are measured in the last step."""
    device, started = resolve_device(config.model.device), time.perf_counter()
    torch.set_num_threads(config.model.threads)
    torch.manual_seed(config.seed)
    planned = planned_model(config, measured=True)
    trainer = planned_trainer(planned)
    loading, metrics = time.perf_counter() - started, []
    plan = config.plan
    with records_for(config.data, plan.prompt_words, config.grpo.prompts_per_step, plan.sources) as records:
        steps = trainer.fit(records)
        for _ in range(config.grpo.steps):
            watch = Stopwatch(device)
            with watched_by(watch):
                step = next(steps)
                watch.stop()
            metrics.append({name: value for name, value in step.values.items() if name.startswith(_KEPT)})
    return {
        "source": planned.source,
        "loading_seconds": loading,
        "phases": {name: {"seconds": row.seconds, "peak_gb": row.peak / 1e9} for name, row in watch.phases.items()},
        "step_seconds": sum(row.seconds for row in watch.phases.values()),
        "peak_gb": max(row.peak for row in watch.phases.values()) / 1e9,
        "metrics": metrics,
        "samples": len(step.samples),
    }


class Stopwatch(Watcher):
    """Measures phases as `operations.plan.meter.Meter` counts them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.phases: dict[str, Phase] = {}
        self._path = [OUTSIDE]
        self._since = self._now()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.stop()
        self._path.append(name)
        try:
            yield
        finally:
            self.stop()
            self._path.pop()

    def stop(self) -> None:
        """Assigns the time since the last call to the phase that is running."""
        now = self._now()
        row = self.phases.setdefault(self._path[-1], Phase())
        row.seconds += now - self._since
        if self._device.type == "cuda":
            row.peak = max(row.peak, torch.cuda.max_memory_allocated(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)
        self._since = now

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def single_module(config: Parameters, module: str) -> Parameters:
    """A training of ``module`` alone, by one process, with ``gpu_check.prompts`` prompts a step."""
    changes = {
        "policy": {"train": module, "stages": "alternating"},
        "grpo": {"prompts_per_step": config.gpu_check.prompts, "steps": config.gpu_check.steps},
        "modules": {name: {"prompts_per_step": None} for name in config.modules},
        "distributed": {"processes": 1, "sharded": False},
    }
    return config.__class__.model_validate(merged(config.model_dump(), changes))


def known_card(device: torch.device) -> str | None:
    """The card that a plan knows by name and memory; None for any other."""
    words = torch.cuda.get_device_name(device).replace("-", " ").split()  # "NVIDIA A100-SXM4-80GB" is not an A10.
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    for card in CARDS:
        name = card.name.split()[-1 if card.name.startswith("RTX") else 0]
        if name in words and abs(card.memory - memory) < 0.1 * card.memory:
            return card.name
    return None
