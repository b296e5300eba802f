"""The provenance of what a command makes: its parameters, what it reads, source files, libraries and processor."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from visual_grpo.adapter_folder import REWARD_COMMIT, START_RUN, read_facts
from visual_grpo.common.device import device_kind, processor, resolve_device
from visual_grpo.config import GRPOConfig, ModelConfig, Parameters
from visual_grpo.provenance import ADJUSTED, MADE_FROM, NUMERICS, RUNTIME, SOURCES, Provenance, code, continued
from visual_grpo.rewards.build import reward_commits
from visual_grpo.training import resuming

if TYPE_CHECKING:
    from visual_grpo.models.run_spec import RunSpec

LIBRARIES = (
    *("accelerate", "diffusers", "numpy", "onnxruntime", "opencv-python-headless", "pandas", "peft", "pillow"),
    *("pytorch-msssim", "rapidfuzz", "rapidocr", "safetensors", "scikit-learn", "scipy", "tokenizers", "torch"),
    *("torchvision", "transformers"),
)
"""Libraries whose versions may change numbers."""
PACKAGE = Path(__file__).parents[1]
_NO_RESULTS = ("operations", "tracking")
"""Packages that show, log or call. What they choose, such as the rewards that fit the data, is in the parameters."""


def of(
    spec: RunSpec, base_model: Mapping[str, Any], data: str, start: str | None = None, **made_from: str
) -> dict[str, Any]:
    """Returns the provenance of a result of this command; see `inputs`."""
    config, unread = spec.config, []
    if len(spec.samplers) == 1:
        unread.append("sampling.rollout")
    if not any(sampler.stochastic for sampler in spec.samplers.values()):
        unread.append("policy.flow")
    return {
        "parameters": config.public(),
        "unread": unread,
        **inputs(config, base_model, data, start),
        **runtime(config.model, config.grpo),
        **({MADE_FROM: made_from} if made_from else {}),
    }


def of_training(
    config: Parameters,
    now: Provenance,
    command: Mapping[str, str],
    start: Path | None,
    resumed: resuming.ResumedRun | None,
) -> dict[str, Any]:
    """Returns the provenance of adapters, with the commands that started and resumed their training.

    Args:
        now: the provenance without the commands (`of`).
        command: what is known of this one (`RunContext.facts`).
        start: the adapters or the LoRA that the training starts from.
    """
    of_result = {name: value for name, value in now.items() if name not in RUNTIME}
    of_command = {**command, **{name: now[name] for name in RUNTIME}}
    start_run = None if start is None or start.is_file() else read_facts(start).get("mlflow_run_id")
    if start_run is not None:
        of_command[START_RUN] = start_run
    if resumed is None:
        return {**of_result, **of_command}
    adjusted = [*resumed.provenance.get(ADJUSTED, "").splitlines(), *resuming.adjusted(resumed, config.public())]
    earlier = {name: value for name, value in resumed.provenance.items() if name not in of_result}
    return {**of_result, **continued(earlier, of_command), **({ADJUSTED: "\n".join(adjusted)} if adjusted else {})}


def inputs(
    config: Parameters, base_model: Mapping[str, Any], data: str, start: str | None = None
) -> dict[str, str | None]:
    """Returns the entries besides parameters and `runtime`: digests of what is read.

    Args:
        base_model: the dataset ``base_model``.
        data: digest of the prepared records.
        start: digest of the adapters that a training starts from.
    """
    digests = {
        "model": base_model["model"],
        "model_digest": base_model["digest"],
        "model_content": base_model["content"],
        "model_lora": base_model.get("lora"),
        "data": data,
        "start": start,
        "device": device_kind(config.model.device),
        **code(config),
        **weights(config),
    }
    return {name: digest for name, digest in digests.items() if digest is not None}


def weights(config: Parameters) -> dict[str, str]:
    """Returns the entries of the weights of rewards that are on the hub."""
    commits = reward_commits(config.rewards)
    return {f"{REWARD_COMMIT}{name}: {option}": c for name, options in commits.items() for option, c in options.items()}


def runtime(model: ModelConfig, grpo: GRPOConfig) -> dict[str, str]:
    """Returns the entries of `RUNTIME`: a digest of this package's files, and libraries and processor in words."""
    # bitsandbytes only where the model or the optimiser is computed with it: other runs need not have it.
    few_bits = (model.base_weights, grpo.optimizer) != ("full", "adamw")
    return {SOURCES: source_digest(), NUMERICS: _numerics(model.device, few_bits)}


def source_digest() -> str:
    """Returns 64 hex digits, which change when a file that results may depend on is edited."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        name, content = file.relative_to(PACKAGE), file.read_bytes()
        if name.parts[0] not in _NO_RESULTS:
            digest.update(f"{name.as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _numerics(device_name: str, few_bits: bool) -> str:
    device = resolve_device(device_name)
    versions = [f"{name} {_version(name)}" for name in (*LIBRARIES, *["bitsandbytes"] * few_bits)]
    hardware = processor()
    if device.type == "cuda":
        hardware += f" {torch.cuda.get_device_name(device)}"
    return ", ".join([f"python {platform.python_version()}", *versions, f"{device.type} {hardware}"])


@cache
def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "none"
