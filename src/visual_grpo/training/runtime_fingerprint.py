"""Fingerprint of source files, library versions and processor, on which numbers depend beside parameters and data."""

from __future__ import annotations

import hashlib
import platform
from importlib import metadata
from pathlib import Path

import torch

from visual_grpo.common.device import resolve_device
from visual_grpo.config import Parameters

LIBRARIES = (
    *("accelerate", "diffusers", "numpy", "onnxruntime", "opencv-python", "pandas", "peft", "pillow"),
    *("pytorch-msssim", "rapidfuzz", "rapidocr", "safetensors", "scikit-learn", "scipy", "tokenizers", "torch"),
    *("torchvision", "transformers"),
)
"""Libraries whose versions may change numbers."""
SOURCES, NUMERICS = "source.digest", "numerics"
MEANING = {SOURCES: "source files of this project", NUMERICS: "versions of libraries, or kind of processor"}

PACKAGE = Path(__file__).parents[1]
_NO_RESULTS = ("operations", "tracking")
"""Packages that show, log or call, and decide nothing that is drawn or learned."""


def runtime_fingerprint(config: Parameters) -> dict[str, str]:
    """``source.digest`` of this package's files; ``numerics``: libraries and processor."""
    return {SOURCES: source_digest(), NUMERICS: _numerics(config)}


def source_digest() -> str:
    """64 hex digits, others after an edit of a file that results may depend on."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        name, content = file.relative_to(PACKAGE), file.read_bytes()
        if name.parts[0] not in _NO_RESULTS:
            digest.update(f"{name.as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _numerics(config: Parameters) -> str:
    device = config.model.device
    versions = [f"{name} {_version(name)}" for name in (*LIBRARIES, *_of_few_bits(config))]
    kind = resolve_device(device).type
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    if kind == "cuda":
        processor += f" {torch.cuda.get_device_name(resolve_device(device))}"
    return ", ".join([f"python {platform.python_version()}", *versions, f"{kind} {processor}"])


def _of_few_bits(config: Parameters) -> list[str]:
    """bitsandbytes, where the model or the optimiser is computed with it: others need not have it."""
    return ["bitsandbytes"] if (config.model.base_weights, config.grpo.optimizer) != ("full", "adamw") else []


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "none"
