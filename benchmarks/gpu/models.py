"""Steps of a released model with random weights: beside the plan, beside a plain loop, and with compiled blocks.

All steps of a model run in one process on the same weights: two of ours, one of the plain loop, two compiled. The
second of ours is the one that is timed; both say how far sampler and replay are apart, before an update and after one.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from cases import COMPILED, RELEASED, released
from plain_loop import PlainLoop
from recording import Machine, Recorder, timed

from visual_grpo.common.errors import UserError
from visual_grpo.common.phases import watched_by
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import Parameters, merged
from visual_grpo.models.execution import VARIANTS, set_execution
from visual_grpo.models.lora_layers import is_compiled
from visual_grpo.operations.gpu_measurement import Stopwatch
from visual_grpo.operations.plan.dry_run import (
    DryRunner,
    PlannedModel,
    planned_model,
    planned_trainer,
    records_for,
)
from visual_grpo.operations.plan.estimate import FLOPS_SHARE, find_card, phase_seconds

CARDS = ("H100", "H200")
LENIENT = {"grpo": {"ratio_tolerance": 1e9, "non_finite": "skip", "steps": 4}}
"""Random weights have flatter distributions than released ones, and may fail a check that is made for those."""
USABLE = 0.95
"""Of the card's memory, as the plan has it."""
COMPILING = "compiling"
WARM = 2
"""Images of the plain loop's first step, in which libraries choose their kernels."""


def run(rows: Recorder, machine: Machine, name: str) -> None:
    config, plan = released(name, machine), machine.plans.get(name, {})
    if not fits(rows, machine, name, plan):
        return
    try:
        bench = Bench(rows, machine, name, config)
    except UserError as error:  # Such as bits without bitsandbytes.
        rows.add("skipped", model=name, reason=str(error).splitlines()[0])
        return
    if machine.tiny and name == COMPILED[0]:
        plan = plan_of(config)
    with records_for(config.data, config.plan.prompt_words, config.grpo.prompts_per_step) as records:
        bench.ours(records, plan)
        environment, module, _ = RELEASED[name]
        if module == "dit" and environment != "glm_image" and config.model.base_weights == "full":
            with rows.guarded("plain loop"):
                bench.plain(records)
        if name in COMPILED[: 1 if machine.tiny else None]:
            with rows.guarded("compiled"):
                bench.compiled(records)


def fits(rows: Recorder, machine: Machine, name: str, plan: Mapping[str, Any]) -> bool:
    """Says in a line which model the card has too little memory for."""
    if not machine.is_cuda:
        return True
    peak = max((phase["peak_gb"] for phase in plan.values()), default=0.0)
    usable = torch.cuda.get_device_properties(machine.device).total_memory * USABLE / 1e9
    if peak > usable:
        reason = f"the plan's peak is {peak:.1f} GB, and this card has {usable:.1f} GB for tensors"
        rows.add("skipped", model=name, reason=reason)
    return peak <= usable


class Bench:
    def __init__(self, rows: Recorder, machine: Machine, name: str, config: Parameters) -> None:
        self.rows, self.machine, self.name, self.config = rows, machine, name, config
        torch.manual_seed(config.seed)
        lenient = config.__class__.model_validate(merged(config.model_dump(), LENIENT))

        def build() -> None:
            self.planned: PlannedModel = planned_model(lenient, measured=True)
            self.trainer = planned_trainer(self.planned)

        seconds, _ = timed(machine, build)
        rows.add("loading", model=name, seconds=seconds, weights=self.planned.source.partition(",")[0])
        self.step_seconds, self.samples = 0.0, 0

    def ours(self, records: list[PromptRecord], plan: Mapping[str, Any]) -> None:
        self._step(records, "before an update")
        watch, self.samples = self._step(records, "after one update")
        card = "H200" if self.machine.is_cuda and "H200" in torch.cuda.get_device_name() else "H100"
        assumed = find_card(card).half * FLOPS_SHARE / 1e12
        best = self.machine.card.get("product bfloat16, TFLOP/s", assumed)
        for phase, measured in watch.phases.items():
            planned = plan.get(phase, {})
            rate, kernels = planned.get("tflop", 0) / measured.seconds, planned.get("kernels")
            self.rows.add(
                "phases",
                model=self.name,
                phase=phase,
                seconds=measured.seconds,
                planned=planned.get("seconds", {}).get(card),
                gb=measured.peak / 1e9,
                planned_gb=planned.get("peak_gb"),
                mfu_percent=100 * rate / best if rate else None,
                us_a_kernel=1e6 * measured.seconds / kernels if kernels else None,
            )
        self.step_seconds, peak = total(watch)
        whole = {"planned": sum(row["seconds"][card] for row in plan.values()) or None, "gb": peak}
        whole |= {"planned_gb": max((row["peak_gb"] for row in plan.values()), default=None)}
        self.rows.add(
            "phases", model=self.name, phase=f"step of {self.samples} samples", seconds=self.step_seconds, **whole
        )

    def plain(self, records: list[PromptRecord]) -> None:
        """One step, after a short one."""
        policy, samples = self.trainer.policy, self.config.grpo.group_size
        PlainLoop(policy, self.config, records, WARM).step()
        loop = PlainLoop(policy, self.config, records, samples)
        seconds, peak = timed(self.machine, loop.step)
        self.rows.add(
            "beside a plain loop",
            model=self.name,
            ours=self.step_seconds,
            plain=seconds,
            ours_of_plain=self.step_seconds / seconds,
            plain_gb=peak,
            largest_log_ratio=float(loop.largest_log_ratio),
        )

    def compiled(self, records: list[PromptRecord]) -> None:
        """A step that compiles and one that does not: what the first costs, and after how many steps that is back."""
        built, model = self.planned.model, self.config.model.model_copy(update={"compile": True})
        gc.collect()
        # On a CPU, graphs run as they are traced: no minutes of a C++ compiler.
        eager = patch.object(torch, "compile", partial(torch.compile, backend="eager"))
        with eager if self.machine.tiny else nullcontext(), recompile_limit():
            set_execution(built.adapters.networks, built.modules, model)
            first, _ = total(self._step(records, COMPILING)[0])
            self.rows.add("first compiled step", model=self.name, seconds=first, uncompiled=self.step_seconds)
            watch, _ = self._step(records, "compiled")
        if not any(map(is_compiled, built.adapters.networks.values())):
            raise RuntimeError("the blocks could not be compiled; the log says why")
        for phase, measured in watch.phases.items():
            self.rows.add("phases", model=f"{self.name}, compiled", phase=phase, seconds=measured.seconds)
        second, peak = total(watch)
        saved, extra = self.step_seconds - second, first - second
        self.rows.add(
            "compiled blocks",
            model=self.name,
            uncompiled=self.step_seconds,
            compiled=second,
            compiled_of_uncompiled=second / self.step_seconds,
            first_costs=extra,
            pays_after_steps=extra / saved if saved > 0 else None,
            pays_after_samples=self.samples * extra / saved if saved > 0 else None,
            gb=peak,
        )

    def _step(self, records: list[PromptRecord], when: str) -> tuple[Stopwatch, int]:
        """Returns its phases and the number of its samples."""
        # A step that compiles keeps the host busy for minutes: others are timed meanwhile.
        with nullcontext() if when == COMPILING else self.machine.alone():
            watch = Stopwatch(torch.device(self.machine.device))
            with watched_by(watch):
                step = next(iter(self.trainer.fit(records)))
                watch.stop()
        gaps = {name.rpartition("/")[2]: value for name, value in step.values.items() if "sampler_gap/" in name}
        dtype, seconds = self.config.model.dtype, total(watch)[0]
        self.rows.add("sampler against replay", model=self.name, dtype=dtype, when=when, **gaps, step_seconds=seconds)
        for metric, value in step.values.items():
            self.rows.add("metrics", model=self.name, when=when, metric=metric, value=value)
        return watch, len(step.samples)


@contextmanager
def recompile_limit() -> Iterator[None]:
    """Before torch 2.13, `torch.compile` has no limit of its own, and the one of all it compiles is read everywhere."""
    real = torch.compile
    if "recompile_limit" in inspect.signature(real).parameters:
        yield
        return

    def compile_without(*args: Any, recompile_limit: int, **kwargs: Any) -> Any:
        return real(*args, **kwargs)

    torch._dynamo.config.recompile_limit = VARIANTS
    with patch.object(torch, "compile", compile_without):
        yield


def total(watch: Stopwatch) -> tuple[float, float]:
    """Seconds and peak memory in 10^9 bytes of all phases."""
    return sum(row.seconds for row in watch.phases.values()), max(row.peak for row in watch.phases.values()) / 1e9


def plan_of(config: Parameters) -> dict[str, Any]:
    """Counts a step without weights or a GPU; phase -> what is planned of it, its seconds by the card's name."""
    runner = DryRunner(planned_model(config))
    return {
        name: {
            "peak_gb": phase.peak / 1e9,
            "tflop": phase.flops / 1e12,
            "kernels": round(phase.kernels),
            "seconds": {card: phase_seconds(phase, find_card(card), config.model.dtype) for card in CARDS},
        }
        for name, phase in runner.step().phases.items()
        if phase.kernels
    }
