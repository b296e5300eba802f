"""Takes steps of a training on a GPU and compares their time and memory with the plan's."""

from __future__ import annotations

import gc
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from visual_grpo.common import console
from visual_grpo.common.device import device_kind, resolve_device
from visual_grpo.common.errors import UserError
from visual_grpo.common.quiet_libraries import hidden_progress_bars
from visual_grpo.config import Parameters, merged
from visual_grpo.config.command import rerun_command
from visual_grpo.operations.plan.dry_run import planned_trainer, records_for
from visual_grpo.operations.plan.estimate import CARDS
from visual_grpo.operations.plan.meter import OUTSIDE, Phase
from visual_grpo.operations.plan.model import planned_model
from visual_grpo.operations.plan.phases import phases_of
from visual_grpo.operations.plan.report import make_plan
from visual_grpo.training import components

_KEPT = ("ratio/", "sampler_gap/", "grad_norm", "loss", "tokens_per_sample")
"""Beginnings of the metrics that are reported."""


def check(parameters: Parameters) -> dict[str, Any]:
    """Measures steps of each trained module and prints them beside the plan; returns both as JSON.

    Raises UserError where the device is no GPU.
    """
    device_name = parameters.model.device
    if device_kind(device_name) != "cuda" or not torch.cuda.is_available():
        raise UserError(
            f"model.device is {device_name}, which is no GPU of this machine; expected one to check. What a training"
            f" needs is planned without any: {rerun_command('plan')}"
        )
    device = resolve_device(device_name)
    facts, model = torch.cuda.get_device_properties(device), parameters.model.path or parameters.starter.model
    plan_settings = parameters.plan.model_copy(update={"gpu": card_of(device)})
    modules, cases = components.make_run_spec(parameters, model).modules, []
    with console.progress("Steps on the GPU", total=len(modules)) as bar:
        for module in modules:
            case = case_of(parameters.model_copy(update={"plan": plan_settings}), module)
            cases.append({"module": module, **caught(measure, case), "plan": caught(make_plan, case)})
            bar.advance(done=module)
    versions = [f"{name} {version(name)}" for name in ("torch", "transformers", "diffusers", "peft")]
    found = {
        "gpu": f"{facts.name}, {facts.total_memory / 1e9:.1f} GB, CUDA {torch.version.cuda}, {', '.join(versions)}",
        "model": model,
        "cases": cases,
    }
    show(found)
    return found


def require_whole(gpu_check: dict[str, Any]) -> None:
    """Raises UserError where a case ended with an error."""
    failed = [f"{case['module']}: {case['error']}" for case in gpu_check["cases"] if "error" in case]
    if failed:
        raise UserError("\n".join(["These steps could not be taken:", *failed]))


def case_of(config: Parameters, module: str) -> Parameters:
    """A training of ``module`` alone, by one process, with ``gpu_check.prompts`` prompts a step."""
    changes = {
        "policy": {"train": module, "stages": "alternating"},
        "grpo": {"prompts_per_step": config.gpu_check.prompts, "steps": config.gpu_check.steps},
        "modules": {name: {"prompts_per_step": None} for name in config.modules},
        "distributed": {"processes": 1, "sharded": False},
    }
    return config.__class__.model_validate(merged(config.model_dump(), changes))


def card_of(device: torch.device) -> str | None:
    """The card that a plan knows by name and memory; None for any other."""
    words = torch.cuda.get_device_name(device).replace("-", " ").split()  # "NVIDIA A100-SXM4-80GB" is no A10.
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    for card in CARDS:
        name = card.name.split()[-1 if card.name.startswith("RTX") else 0]
        if name in words and abs(card.memory - memory) < 0.1 * card.memory:
            return card.name
    return None


def caught(work: Callable[[Parameters], dict[str, Any]], config: Parameters) -> dict[str, Any]:
    """Returns the result of ``work``, or its error as text, and frees what it held on the GPU."""
    try:
        with hidden_progress_bars():
            return work(config)
    except UserError as error:
        return {"error": str(error)}
    except Exception as error:  # Whatever it is, the other modules are checked.
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def measure(config: Parameters) -> dict[str, Any]:
    """Returns JSON; seconds and memory are those of the last step."""
    device, started = resolve_device(config.model.device), time.perf_counter()
    torch.set_num_threads(config.model.threads)
    torch.manual_seed(config.seed)
    planned = planned_model(config, measured=True)
    trainer = planned_trainer(config, planned.plan, planned.model)
    loading, metrics = time.perf_counter() - started, []
    with records_for(config, config.grpo.prompts_per_step) as records:
        steps = trainer.fit(records)
        for _ in range(config.grpo.steps):
            watch = Stopwatch(device)
            with host_waits(device) as waits, phases_of(watch, trainer):
                step = next(steps)
                watch.stop()
            metrics.append({name: value for name, value in step.values.items() if name.startswith(_KEPT)})
    return {
        "source": planned.source,
        "loading_seconds": loading,
        "phases": {name: {"seconds": row.seconds, "peak_gb": row.peak / 1e9} for name, row in watch.phases.items()},
        "step_seconds": sum(row.seconds for row in watch.phases.values()),
        "peak_gb": max(row.peak for row in watch.phases.values()) / 1e9,
        "host_waits": dict(waits.most_common()),
        "metrics": metrics,
        "samples": len(step.samples),
    }


class Stopwatch:
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


@contextmanager
def host_waits(device: torch.device) -> Iterator[Counter[str]]:
    """Source line -> how often CUDA made the host wait there, filled at the end; hides warnings meanwhile."""
    found: Counter[str] = Counter()
    if device.type != "cuda":
        yield found
        return
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for warning in told:
        if "synchronizing CUDA" in str(warning.message):
            found[f"{'/'.join(Path(warning.filename).parts[-3:])}:{warning.lineno}"] += 1


def show(check: Mapping[str, Any]) -> None:
    """Prints the check so that it can be pasted into an issue: each phase beside the plan's, errors, and peaks that
    differ from the plan's by more than a tenth."""
    console.note(f"GPU check of {check['model']} on {check['gpu']}")
    for case in check["cases"]:
        module, plan = case["module"], case["plan"]
        if "error" in case:
            console.note(f"{module}: {case['error']}")
            continue
        columns = ("phase", "seconds", "planned seconds", "peak GB", "planned GB")
        rows = rows_of(case)
        console.table(f"{module}, {case['samples']} samples", columns, rows)
        console.summary("", facts_of(case))
        peak, planned = rows[-1][-2:]
        if "error" in plan:
            console.note(f"{module}: there is no plan: {plan['error']}")
        elif abs(peak / planned - 1) > 0.1:
            console.note(f"{module}: the peak is {peak:.1f} GB, planned were {planned:.1f} GB")


def rows_of(case: Mapping[str, Any]) -> list[list[Any]]:
    """Phase, measured and planned seconds, measured and planned peak in GB; the whole step last."""
    planned = {row["phase"]: row for row in case["plan"].get("step", ())}
    rows: list[list[Any]] = []
    for name, measured in case["phases"].items():
        expected = planned.get(name, {})
        rows.append([name, measured["seconds"], expected.get("seconds"), measured["peak_gb"], expected.get("peak_gb")])
    total = sum(row["seconds"] for row in planned.values()) if planned else None
    largest = max((row["peak_gb"] for row in planned.values()), default=None)
    return [*rows, ["step", case["step_seconds"], total, case["peak_gb"], largest]]


def facts_of(case: Mapping[str, Any]) -> dict[str, float | str]:
    """Weights, speed, host waits, and the metrics of the first step."""
    planned = sum(row["host_waits"] for row in case["plan"].get("step", ()))
    facts = {
        "weights": f"{case['source']}, loaded in {case['loading_seconds']:.0f} s",
        "samples a second": case["samples"] / case["step_seconds"],
        "host waits": f"{sum(case['host_waits'].values())}, planned {planned}",
    }
    if "tokens" in case["phases"]:
        tokens = case["samples"] * case["metrics"][-1]["tokens_per_sample"]
        facts["tokens a second"] = tokens / case["phases"]["tokens"]["seconds"]
    return facts | case["metrics"][0]
