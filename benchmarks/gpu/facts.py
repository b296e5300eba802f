"""The machine: versions, what the card reaches, and what the plan assumes of it (operations/plan/estimate.py)."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib.metadata import distributions
from typing import Any

import torch
from recording import Machine, Recorder, seconds_of

from visual_grpo.operations.gpu_measurement import known_card
from visual_grpo.operations.plan.estimate import BANDWIDTH_SHARE, FLOPS_SHARE, HOST_BANDWIDTH, LAUNCH_SECONDS, find_card

PACKAGES = ("torch", "transformers", "diffusers", "peft", "bitsandbytes", "triton", "kedro")


def run(rows: Recorder, machine: Machine, _: str) -> None:
    versions = {package.name: package.version for package in reversed(list(distributions()))}  # The first counts.
    for name in PACKAGES:
        rows.add("versions", package=name, version=versions.get(name))
    rows.add("versions", package="python", version=f"{platform.python_version()}, {len(os.sched_getaffinity(0))} cores")
    if machine.is_cuda:
        card = torch.cuda.get_device_properties(machine.device)
        about = f"{card.name}, {card.total_memory / 2**30:.1f} GiB, CUDA {torch.version.cuda}"
        rows.add("versions", package="card", version=f"{about}; the plan knows {known_card(torch.device('cuda'))}")
    for measure in (_products, _copies, _launches):
        with rows.guarded(measure.__name__):
            measure(rows, machine)


def _products(rows: Recorder, machine: Machine) -> None:
    """Matrix products of a size that fills the card."""
    size = 8192 if machine.is_cuda else 256
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        one, other = (torch.randn(size, size, device=machine.device, dtype=dtype) for _ in range(2))
        rate = 2 * size**3 / seconds_of(lambda one=one, other=other: one @ other)  # type: ignore[misc]
        assumed = find_card("H100").half * FLOPS_SHARE / 1e12 if dtype.itemsize == 2 else None
        name = str(dtype).removeprefix("torch.")
        rows.add("card", what=f"product {name}, TFLOP/s", measured=rate / 1e12, planned=assumed)


def _copies(rows: Recorder, machine: Machine) -> None:
    source = torch.empty(2**32 if machine.is_cuda else 2**24, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    rate = 2 * source.nbytes / seconds_of(lambda: target.copy_(source))
    assumed = find_card("H100").bandwidth * BANDWIDTH_SHARE / 1e9
    rows.add("card", what="copy on the device, GB/s", measured=rate / 1e9, planned=assumed)
    if machine.is_cuda:
        pinned = torch.empty(2**28, dtype=torch.uint8).pin_memory()
        there = target[: pinned.nbytes]
        for what, work in (("to", lambda: there.copy_(pinned)), ("from", lambda: pinned.copy_(there))):
            rate = pinned.nbytes / seconds_of(work) / 1e9
            rows.add("card", what=f"copy {what} the device, pinned, GB/s", measured=rate, planned=HOST_BANDWIDTH / 1e9)


def _launches(rows: Recorder, machine: Machine) -> None:
    count, few = 1000, torch.zeros(8, 64, device=machine.device)
    layer = torch.nn.Linear(64, 64, device=machine.device)

    def repeated(work: Callable[[], Any]) -> Callable[[], None]:
        def many() -> None:
            with torch.no_grad():
                for _ in range(count):
                    work()

        return many

    for what, work in (("small kernel", lambda: few.add_(1.0)), ("small Linear", lambda: layer(few))):
        each = seconds_of(repeated(work)) / count
        rows.add("card", what=f"{what}, us", measured=each * 1e6, planned=LAUNCH_SECONDS * 1e6)
