"""The machine: versions, what the card reaches, and what the plan assumes of it (operations/plan/estimate.py)."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import distributions
from typing import Any

import torch
from recording import Machine, Recorder, seconds_of, tf32
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from visual_grpo.operations.gpu_measurement import known_card
from visual_grpo.operations.plan.estimate import BANDWIDTH_SHARE, FLOPS_SHARE, HOST_BANDWIDTH, LAUNCH_SECONDS, find_card

PACKAGES = ("torch", "transformers", "diffusers", "peft", "accelerate", "huggingface_hub", "numpy", "triton", "kedro")
RANK = 32


def run(rows: Recorder, machine: Machine, _: str) -> None:
    versions = {package.name: package.version for package in reversed(list(distributions()))}  # The first counts.
    for name in PACKAGES:
        rows.add("versions", package=name, version=versions.get(name))
    rows.add("versions", package="python", version=f"{platform.python_version()}, {len(os.sched_getaffinity(0))} cores")
    if machine.is_cuda:
        card = torch.cuda.get_device_properties(machine.device)
        about = f"{card.name}, {card.total_memory / 2**30:.1f} GiB, CUDA {torch.version.cuda}"
        rows.add("versions", package="card", version=f"{about}; the plan knows {known_card(torch.device('cuda'))}")
    for measure in (_products, _copies, _launches, _layers, _attention):
        with rows.guarded(measure.__name__):
            measure(rows, machine)


def _products(rows: Recorder, machine: Machine) -> None:
    """Matrix products of a size that fills the card."""
    size = 8192 if machine.is_cuda else 256
    kinds: dict[str, tuple[torch.dtype, bool]] = {
        "bfloat16": (torch.bfloat16, False),
        "float16": (torch.float16, False),
        "float32": (torch.float32, False),
        "tf32": (torch.float32, True),
    }
    for name, (dtype, fast) in kinds.items():
        if name == "tf32" and not machine.is_cuda:
            continue
        one, other = (torch.randn(size, size, device=machine.device, dtype=dtype) for _ in range(2))
        with tf32(fast):
            rate = 2 * size**3 / seconds_of(lambda one=one, other=other: one @ other)  # type: ignore[misc]
        assumed = find_card("H100").half * FLOPS_SHARE / 1e12 if dtype.itemsize == 2 else None
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


def _shape(machine: Machine) -> tuple[int, int, int, int]:
    """Rows, tokens, width and heads of SD3.5 medium's blocks at 512 px, of a rollout's batch with both branches."""
    return (16, 1357, 1536, 24) if machine.is_cuda else (2, 32, 128, 2)


def _layers(rows: Recorder, machine: Machine) -> None:
    """A Linear layer in bfloat16, and what a LoRA on it costs in each precision."""
    count, tokens, width, _ = _shape(machine)
    x = torch.randn(count * tokens, width, device=machine.device, dtype=torch.bfloat16)
    weight, down, up = (
        torch.randn(*shape, device=machine.device) for shape in ((width, width), (RANK, width), (width, RANK))
    )
    wide, half, halves = x.float(), weight.bfloat16(), (down.bfloat16(), up.bfloat16())

    def lora(of: Tensor, one: Tensor, other: Tensor) -> Callable[[], Tensor]:
        return lambda: F.linear(F.linear(of, one), other)

    works: dict[str, tuple[Callable[[], Any], bool]] = {
        "Linear in bfloat16": (lambda: F.linear(x, half), False),
        f"LoRA of rank {RANK} in float32, as peft has it": (lora(wide, down, up), False),
        f"LoRA of rank {RANK} in tf32": (lora(wide, down, up), True),
        f"LoRA of rank {RANK} in bfloat16": (lora(x, *halves), False),
        "its input to float32": (x.float, False),
    }
    for what, (work, fast) in works.items():
        with tf32(fast):
            rows.add("a layer of SD3.5 medium", what=what, ms=seconds_of(work) * 1e3)


def _attention(rows: Recorder, machine: Machine) -> None:
    count, tokens, width, heads = _shape(machine)
    shape = (count, heads, tokens, width // heads)
    q, k, v = (torch.randn(*shape, device=machine.device, dtype=torch.bfloat16) for _ in range(3))
    names = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION") if machine.is_cuda else ("FLASH_ATTENTION",)
    for name in ("torch's choice", *names, "MATH"):
        with rows.guarded(f"attention {name}"):
            chosen = nullcontext() if name == "torch's choice" else sdpa_kernel(getattr(SDPBackend, name))
            with torch.no_grad(), chosen:
                seconds = seconds_of(lambda: F.scaled_dot_product_attention(q, k, v))
            rate = 4 * count * heads * tokens**2 * (width // heads) / seconds / 1e12
            rows.add("a layer of SD3.5 medium", what=f"attention, {name}", ms=seconds * 1e3, tflop_s=rate)
