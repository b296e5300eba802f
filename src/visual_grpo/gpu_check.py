"""Takes steps of a training on a GPU and compares their time and memory with the plan's."""

from __future__ import annotations

import multiprocessing
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from visual_grpo import components, console
from visual_grpo.command import again
from visual_grpo.config import Parameters, merged
from visual_grpo.errors import UserError
from visual_grpo.hardware.device import device_kind, resolve_device
from visual_grpo.plan.dry_run import planned_trainer, records_for, with_planned_reward
from visual_grpo.plan.estimate import CARDS
from visual_grpo.plan.meter import Phase
from visual_grpo.plan.model import configuration_folder, has_weights, load_without_weights
from visual_grpo.plan.phases import OUTSIDE, phases_of
from visual_grpo.plan.report import make_plan
from visual_grpo.policies import family_settings
from visual_grpo.policies.families import find_family
from visual_grpo.policies.family import Family, ModelSettings
from visual_grpo.third_party_output import hidden_progress_bars

_KEPT = ("ratio/", "sampler_gap/", "grad_norm", "loss", "tokens_per_sample")
"""Beginnings of the metrics that are reported."""


def check_gpu(config: Parameters) -> dict[str, Any]:
    """Returns JSON: the GPU, and for each trained module the measured and the planned step, or the error.

    Raises UserError where the device is no GPU.
    """
    if device_kind(config.model.device) != "cuda" or not torch.cuda.is_available():
        raise UserError(
            f"model.device is {config.model.device}, which is no GPU of this machine; expected one to check. What a"
            f" training needs is planned without any: {again('plan')}"
        )
    device = resolve_device(config.model.device)
    facts, card = torch.cuda.get_device_properties(device), card_of(device)
    modules = components.make_plan(config, config.model.path or config.starter.model).modules
    cases = []
    with console.progress("Steps on the GPU", total=len(modules)) as bar:
        for module in modules:
            cases.append({"module": module, **_measured_and_planned(case_of(config, module), card)})
            bar.advance(done=module)
    versions = [f"{name} {version(name)}" for name in ("torch", "transformers", "diffusers", "peft")]
    return {
        "gpu": f"{facts.name}, {facts.total_memory / 1e9:.1f} GB, CUDA {torch.version.cuda}, {', '.join(versions)}",
        "model": config.model.path or config.starter.model,
        "cases": cases,
    }


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
    for card in CARDS.values():
        name = card.name.split()[-1 if card.name.startswith("RTX") else 0]
        if name in words and abs(card.memory - memory) < 0.1 * card.memory:
            return card.name
    return None


def _measured_and_planned(config: Parameters, card: str | None) -> dict[str, Any]:
    settings = config.plan.model_copy(update={"gpu": card})
    # In another process: neither its errors nor its memory reach the next case. A fork could not use the GPU.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        measuring = pool.submit(caught, measure, config)
        plan = caught(make_plan, config.model_copy(update={"plan": settings}))
        return {**caught(lambda _: measuring.result(), config), "plan": plan}


def caught(work: Callable[[Parameters], dict[str, Any]], config: Parameters) -> dict[str, Any]:
    """Returns the result of ``work``, or its error as text, which can always leave a process."""
    try:
        with hidden_progress_bars():
            return work(config)
    except UserError as error:
        return {"error": str(error)}
    except Exception as error:  # Whatever it is, the other modules are checked.
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def measure(config: Parameters) -> dict[str, Any]:
    """Returns JSON; seconds and memory are those of the last step."""
    device = resolve_device(config.model.device)
    torch.set_num_threads(config.model.threads)
    torch.manual_seed(config.seed)
    config, started = with_planned_reward(config), time.perf_counter()
    family, loaded, source = load_model(config, device)
    plan = family_settings.make_plan(family, config)
    settings = ModelSettings(size=(config.data.height, config.data.width), policy=config.policy, options=plan.options)
    trainer = planned_trainer(config, plan, family.build(loaded, settings))
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
        "source": source,
        "loading_seconds": loading,
        "phases": {name: {"seconds": row.seconds, "peak_gb": row.peak / 1e9} for name, row in watch.phases.items()},
        "step_seconds": sum(row.seconds for row in watch.phases.values()),
        "peak_gb": max(row.peak for row in watch.phases.values()) / 1e9,
        "host_waits": dict(waits.most_common()),
        "metrics": metrics,
        "samples": len(step.samples),
    }


def load_model(config: Parameters, device: torch.device) -> tuple[Family, Any, str]:
    """Family, loaded model and origin of its weights: saved or downloaded ones, else random ones of the size that the
    configuration files say. Downloads nothing."""
    with configuration_folder(config) as (folder, source):
        family = find_family(config.model.family, folder)
        if has_weights(folder):
            return family, family.load(folder, config.model), f"the weights in {folder}"
        # Offloaded networks are copied to the GPU from the host.
        built_on = "cpu" if config.model.offload != "none" else str(device)
        loaded = load_without_weights(family, folder, config.model, built_on)
        return family, loaded, f"random weights, sizes from {source}"


class Stopwatch:
    """Measures phases as `plan.meter.Meter` counts them."""

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
    """Prints the check so that it can be pasted into an issue."""
    console.note(f"GPU check of {check['model']} on {check['gpu']}")
    for case in check["cases"]:
        if "error" not in case:
            columns = ("phase", "seconds", "planned seconds", "peak GB", "planned GB")
            console.table(f"{case['module']}, {case['samples']} samples", columns, rows_of(case))
            console.summary("", facts_of(case))
    for finding in findings(check):
        console.note(finding)


def findings(check: Mapping[str, Any]) -> list[str]:
    """Errors, and peaks that differ from the plan's by more than a tenth."""
    found = []
    for case in check["cases"]:
        planned = max((row["peak_gb"] for row in case["plan"].get("step", ())), default=0.0)
        if "error" in case:
            found.append(f"{case['module']}: {case['error']}")
        elif "error" in case["plan"]:
            found.append(f"{case['module']}: there is no plan: {case['plan']['error']}")
        elif abs(case["peak_gb"] / planned - 1) > 0.1:
            found.append(f"{case['module']}: the peak is {case['peak_gb']:.1f} GB, planned were {planned:.1f} GB")
    return found


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


def facts_of(case: Mapping[str, Any]) -> dict[str, float | str | None]:
    metrics, tokens = case["metrics"][0], case["phases"].get("tokens", {}).get("seconds")
    count = case["metrics"][-1].get("tokens_per_sample")
    planned = sum(row["host_waits"] for row in case["plan"].get("step", ()))
    facts = {
        "weights": f"{case['source']}, loaded in {case['loading_seconds']:.0f} s",
        "samples a second": case["samples"] / case["step_seconds"],
        "tokens a second": case["samples"] * count / tokens if tokens and count else None,
        "first ratio, largest |log|": metrics.get("ratio/first_max_abs_log"),
        "sampler's gap, mean": metrics.get("sampler_gap/mean"),
        "gradient norm": metrics.get("grad_norm"),
        "host waits": f"{sum(case['host_waits'].values())}, planned {planned}",
        "most waits at": ", ".join(f"{line} ({n})" for line, n in list(case["host_waits"].items())[:5]),
    }
    return {name: value for name, value in facts.items() if value not in (None, "")}
