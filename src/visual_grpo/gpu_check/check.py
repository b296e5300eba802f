"""All cases, each in a process of its own, with the plan of each."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

import torch

from visual_grpo import components, console
from visual_grpo.command import again
from visual_grpo.config import Parameters
from visual_grpo.errors import UserError
from visual_grpo.gpu_check.cases import Case, cases_of
from visual_grpo.gpu_check.machine import card_of, describe
from visual_grpo.gpu_check.measure import measure
from visual_grpo.hardware.device import device_kind, resolve_device


def check_gpu(parameters: Parameters) -> dict[str, Any]:
    """As JSON: the machine, and for each case what was measured beside its plan, or the error that ended it.

    Raises UserError where the device is no GPU.
    """
    if device_kind(parameters.model.device) != "cuda" or not torch.cuda.is_available():
        there = "a CPU is asked for" if torch.cuda.is_available() else "there is only a CPU here"
        raise UserError(
            f"model.device is {parameters.model.device}, and {there}; this checks a GPU. What a training needs on one"
            f" is told without any: {again('plan')}"
        )
    device = resolve_device(parameters.model.device)
    cases = cases_of(parameters, components.family_of(parameters, parameters.model.path or parameters.starter.model))
    configured = [case.configured(parameters) for case in cases]
    card = card_of(device)
    with _processes(_beside(len(cases))) as planners:
        # A plan takes one core for minutes: they are made while the GPU works.
        plans = [planners.submit(_plan, config, None if card is None else card.name) for config in configured]
        rows = [
            {"module": case.module, "height": case.height, "width": case.width, **found}
            for case, found in zip(cases, _measured(cases, configured), strict=True)
        ]
        for row, plan in zip(rows, plans, strict=True):
            row["plan"] = _result(plan)
    return {
        "machine": describe(device, getattr(torch, parameters.model.dtype)),
        "card": None if card is None else card.name,
        "model": parameters.model.path or parameters.starter.model,
        "prompts": parameters.gpu_check.prompts,
        "group_size": parameters.grpo.group_size,
        "cases": rows,
    }


def _measured(cases: Sequence[Case], configured: Sequence[Parameters]) -> Iterator[dict[str, Any]]:
    """One process after the other: an error, or memory that one does not give back, is no other's."""
    with console.progress("Steps on the GPU", total=len(cases)) as bar:
        for case, config in zip(cases, configured, strict=True):
            with _processes(1) as pool:
                found = _result(pool.submit(_caught, measure, config))
            bar.advance(done=case.title)
            yield found


def _plan(config: Parameters, card: str | None) -> dict[str, Any]:
    """Of a check's few prompts; seconds only for a card that is known."""
    from visual_grpo.plan.make import make_plan

    settings = config.plan.model_copy(update={"gpu": card, "largest_batches": False})
    found = _caught(make_plan, config.model_copy(update={"plan": settings}))
    if "step" in found:
        found["peak_gb_of_step"] = max(row["peak_gb"] for row in found["step"])
    return found


def _caught(work: Callable[[Parameters], dict[str, Any]], config: Parameters) -> dict[str, Any]:
    """What ``work`` gives, or its error, which a process could not always hand over."""
    from visual_grpo.third_party_output import hidden_progress_bars

    try:
        with hidden_progress_bars():
            return work(config)
    except UserError as error:
        return {"error": str(error)}
    except Exception as error:  # Whatever it is, the other cases are checked.
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def _result(future: Future[dict[str, Any]]) -> dict[str, Any]:
    try:
        return future.result()
    except BrokenProcessPool as error:  # The process itself has ended.
        return {"error": f"{type(error).__name__}: {error}"}


@contextmanager
def _processes(count: int) -> Iterator[ProcessPoolExecutor]:
    # A forked process cannot use a GPU that its parent has used.
    pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _beside(cases: int) -> int:
    """Processes that plan while another one measures, which needs cores of its own."""
    return max(1, min(cases, (os.cpu_count() or 1) // 4))
