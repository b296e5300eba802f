"""Takes steps of a training on the GPU and measures each phase."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from visual_grpo import components
from visual_grpo.config import Parameters
from visual_grpo.hardware.device import resolve_device
from visual_grpo.plan.dry_run import REWARD, records_for, unequal_scores, with_planned_reward
from visual_grpo.plan.meter import OUTSIDE
from visual_grpo.plan.model import configuration_folder, has_weights, load_without_weights
from visual_grpo.plan.phases import phases_of
from visual_grpo.policies.families import find_family
from visual_grpo.policies.family import Family, ModelSettings
from visual_grpo.policies.family_settings import make_plan
from visual_grpo.rewards.combine import RewardSet

_KEPT = ("ratio/", "sampler_gap/", "grad_norm", "loss", "tokens_per_sample")
"""Beginnings of the metrics that are reported."""


def measure(config: Parameters) -> dict[str, Any]:
    """Returns JSON; seconds and memory are those of the last step. The trainer checks the first ratios as ever."""
    device = resolve_device(config.model.device)
    torch.set_num_threads(config.model.threads)
    torch.manual_seed(config.seed)
    config, started = with_planned_reward(config), time.perf_counter()
    family, loaded, source = load_model(config, device)
    plan = make_plan(family, config)
    settings = ModelSettings(size=(config.data.height, config.data.width), policy=config.policy, options=plan.options)
    scorer = RewardSet({REWARD: (unequal_scores, 1.0)})
    trainer: Any = components.build_trainer(config, plan, family.build(loaded, settings), scorer)
    seconds, metrics = time.perf_counter() - started, []
    with records_for(config, config.grpo.prompts_per_step) as records:
        steps = trainer.fit(records)
        for _ in range(config.grpo.steps):
            watch = Stopwatch(device)
            with host_waits(device) as waits, phases_of(watch, trainer):
                step = next(steps)
                watch.stop()
            metrics.append({name: value for name, value in step.values.items() if name.startswith(_KEPT)})
    return {
        "source": source,
        "loading_seconds": seconds,
        "phases": {name: {"seconds": row.seconds, "peak_gb": row.peak / 1e9} for name, row in watch.phases.items()},
        "step_seconds": sum(row.seconds for row in watch.phases.values()),
        "peak_gb": max(row.peak for row in watch.phases.values()) / 1e9,
        "host_waits": dict(waits.most_common()),
        "metrics": metrics,
        "samples": len(step.samples),
    }


def load_model(config: Parameters, device: torch.device) -> tuple[Family, Any, str]:
    """Family, what its ``load`` gives, and where the weights come from: saved or downloaded ones, else random ones of
    the size that the configuration files say. Downloads nothing."""
    with configuration_folder(config) as (folder, source):
        family = find_family(config.model.family, folder)
        if has_weights(folder):
            return family, family.load(folder, config.model), f"the weights in {folder}"
        # Offloaded networks are copied to the GPU from the host.
        built_on = "cpu" if config.model.offload != "none" else str(device)
        loaded = load_without_weights(family, folder, config.model, built_on)
        return family, loaded, f"random weights, sizes from {source}"


@dataclass(kw_only=True)
class Measured:
    seconds: float = 0.0
    peak: int = 0
    """Bytes of all tensors at once; 0 on a CPU."""


class Stopwatch:
    """Measures phases as `plan.meter.Meter` counts them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.phases: dict[str, Measured] = {}
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
        row = self.phases.setdefault(self._path[-1], Measured())
        row.seconds += now - self._since
        if self._device.type == "cuda":
            row.peak = max(row.peak, torch.cuda.max_memory_allocated(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)
        self._since = now

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


@contextmanager
def host_waits(device: torch.device) -> Iterator[Counter[str]]:
    """Source line -> how often CUDA made the host wait there, filled at the end; hides warnings meanwhile."""
    found: Counter[str] = Counter()
    with warnings.catch_warnings(record=device.type == "cuda") as caught:
        if caught is None:
            yield found
            return
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = (each for each in caught if "synchronizing CUDA" in str(each.message))
    found.update(f"{'/'.join(Path(each.filename).parts[-3:])}:{each.lineno}" for each in waits)
