"""Runs every module at every size in a separate process, and plans it in this one."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from typing import Any

import torch

from visual_grpo import components, console
from visual_grpo.command import again
from visual_grpo.config import Parameters, merged
from visual_grpo.errors import UserError
from visual_grpo.gpu_check.measure import measure
from visual_grpo.hardware.device import device_kind, resolve_device
from visual_grpo.plan.estimate import CARDS
from visual_grpo.plan.report import make_plan
from visual_grpo.policies.family import Family
from visual_grpo.policies.family_settings import trained_modules
from visual_grpo.third_party_output import hidden_progress_bars

_LEAST = 256
"""Pixels of half a height that are worth checking beside the whole one."""


def check_gpu(parameters: Parameters) -> dict[str, Any]:
    """Returns JSON: the machine, and what was measured and planned of each case, or the error that ended it.

    Raises UserError where the device is no GPU.
    """
    if device_kind(parameters.model.device) != "cuda" or not torch.cuda.is_available():
        there = "a CPU is asked for" if torch.cuda.is_available() else "there is only a CPU here"
        raise UserError(
            f"model.device is {parameters.model.device}, and {there}; this checks a GPU. What a training needs on one"
            f" is told without any: {again('plan')}"
        )
    device = resolve_device(parameters.model.device)
    facts, card = torch.cuda.get_device_properties(device), card_of(device)
    cases = cases_of(parameters, components.family_of(parameters, parameters.model.path or parameters.starter.model))
    rows = []
    with console.progress("Steps on the GPU", total=len(cases)) as bar:
        for name, config in cases.items():
            rows.append({"case": name, **_measured_and_planned(config, card)})
            bar.advance(done=name)
    return {
        "machine": {
            "gpu": f"{facts.name}, {facts.total_memory / 1e9:.1f} GB, compute capability {facts.major}.{facts.minor}",
            "cuda": torch.version.cuda,
            **{name: version(name) for name in ("torch", "transformers", "diffusers", "peft")},
        },
        "model": parameters.model.path or parameters.starter.model,
        "samples_a_step": parameters.gpu_check.prompts * parameters.grpo.group_size,
        "cases": rows,
    }


def _measured_and_planned(config: Parameters, card: str | None) -> dict[str, Any]:
    settings = config.plan.model_copy(update={"gpu": card, "largest_batches": False})
    # In another process: neither its errors nor its memory reach the next case. A fork could not use the GPU.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        measuring = pool.submit(caught, measure, config)
        plan = caught(make_plan, config.model_copy(update={"plan": settings}))
        return {**caught(lambda _: measuring.result(), config), "plan": plan}


def cases_of(parameters: Parameters, family: Family) -> dict[str, Parameters]:
    """One module at one size with few prompts, by name, small ones first.

    Raises UserError for a module that the family does not have, or a size that is no multiple of 32.
    """
    check, data = parameters.gpu_check, parameters.data
    modules = trained_modules(family, parameters.policy.model_copy(update={"train": check.modules or ["all"]}))
    half = [data.height // 2] if data.height // 2 >= _LEAST else []
    own = {name: {"prompts_per_step": None} for name in parameters.modules}
    few = {"prompts_per_step": check.prompts, "steps": check.steps}
    cases = {}
    for height in sorted(check.sizes or [*half, data.height]):
        width = height * data.width // data.height
        if height < 32 or height % 32 or width % 32:
            raise UserError(
                f"gpu_check.sizes has {height}, which makes pictures of {height} x {width} pixels; expected heights and"
                f" widths that are multiples of 32. data.height x data.width is {data.height} x {data.width}."
            )
        for module in modules:
            changes = {
                "data": {"height": height, "width": width},
                "policy": {"train": module, "stages": "alternating"},
                "grpo": few,
                "modules": own,
                "distributed": {"processes": 1, "sharded": False},
            }
            tree = merged(parameters.model_dump(), changes)
            cases[f"{module}, {height} x {width}"] = parameters.__class__.model_validate(tree)
    return cases


def card_of(device: torch.device) -> str | None:
    """The card that a plan knows by name and memory; None for any other."""
    words = torch.cuda.get_device_name(device).replace("-", " ").split()  # "NVIDIA A100-SXM4-80GB" is no A10.
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    for card in CARDS.values():
        name = card.name.split()[-1 if card.name.startswith("RTX") else 0]
        if name in words and abs(card.memory - memory) < 0.1 * card.memory:
            return card.name
    return None


def caught(work: Callable[[Parameters], dict[str, Any]], config: Parameters) -> dict[str, Any]:
    """What ``work`` returns, or its error as text, which can always leave a process."""
    try:
        with hidden_progress_bars():
            return work(config)
    except UserError as error:
        return {"error": str(error)}
    except Exception as error:  # Whatever it is, the other cases are checked.
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
