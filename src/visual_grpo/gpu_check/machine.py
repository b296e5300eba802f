"""What the GPU is, and which attention kernels it takes."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from visual_grpo.plan.cards import CARDS, Card

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
}
_LIBRARIES = ("torch", "transformers", "diffusers", "peft")


def describe(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Names, versions, memory, and the attention kernels that run for ``dtype``: with a mask, and without one."""
    if device.type != "cuda":
        return {"gpu": "none", "libraries": _libraries()}
    facts = torch.cuda.get_device_properties(device)
    return {
        "gpu": facts.name,
        "memory_gb": facts.total_memory / 1e9,
        "free_gb": torch.cuda.mem_get_info(device)[0] / 1e9,
        "multiprocessors": facts.multi_processor_count,
        "compute_capability": f"{facts.major}.{facts.minor}",
        "cuda": torch.version.cuda,
        "half_precision": {"bfloat16": torch.cuda.is_bf16_supported(including_emulation=False)},
        "attention": {name: _runs(device, dtype, masked=False, backend=kind) for name, kind in _BACKENDS.items()},
        "attention_with_mask": {
            name: _runs(device, dtype, masked=True, backend=kind) for name, kind in _BACKENDS.items()
        },
        "libraries": _libraries(),
    }


def card_of(device: torch.device) -> Card | None:
    """The one that a plan knows; None for any other."""
    if device.type != "cuda":
        return None
    # "NVIDIA A100-SXM4-80GB" is no A10.
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    memory = torch.cuda.get_device_properties(device).total_memory
    fitting = [card for card in CARDS.values() if card.name.split()[-1 if card.name.startswith("RTX") else 0] in words]
    return next((card for card in fitting if abs(card.memory - memory) < 0.1 * card.memory), None)


def _runs(device: torch.device, dtype: torch.dtype, *, masked: bool, backend: SDPBackend) -> bool:
    """Heads of 128, as the released models have."""
    states = torch.randn(1, 2, 64, 128, device=device, dtype=dtype)
    mask = torch.ones(1, 1, 64, 64, device=device, dtype=torch.bool) if masked else None
    try:
        with sdpa_kernel(backend):
            scaled_dot_product_attention(states, states, states, attn_mask=mask)
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def _libraries() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: version(name) for name in _LIBRARIES}
