"""Provenance: what a result depends on, recorded beside it, and how two records differ.

A record maps names to JSON values: ``parameters`` to the parameter tree, and the names of `MEANING` and of the rewards'
code and files to digests. training.json is a record with other entries beside; a checkpoint's metadata hold one as
``provenance``, its parameters apart. A baseline's stamp is a record, which says whether to draw it again; its scores
have a `samples_record`, which says with what they pair. What may differ is a table of patterns below.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from visual_grpo.common.device import device_kind, processor, resolve_device
from visual_grpo.common.digests import option_files
from visual_grpo.common.errors import Remedy, UserError
from visual_grpo.common.importing import code_digest, option_code
from visual_grpo.config import (
    BESIDE_FLOW,
    DataConfig,
    GRPOConfig,
    ModelConfig,
    Parameters,
    PolicyConfig,
    flatten,
    merged,
)
from visual_grpo.config.adapter_folder import CODE, COMMIT, FILE
from visual_grpo.config.presets import AUTO
from visual_grpo.models.run_spec import RunSpec
from visual_grpo.rewards.catalogue import is_negative_points, reward_commits, transport_of

Provenance = Mapping[str, Any]
"""A record."""

SOURCES, NUMERICS = "source.digest", "numerics"
RUNTIME = {SOURCES: "source files of this project", NUMERICS: "versions of libraries, or kind of processor"}
MEANING = {
    "model_digest": "base model",
    "model_content": "files of the base model",
    "data": "data",
    "start": "adapters at the start",
    "family_code": "code of the family",
    **RUNTIME,
}
"""Entry of a record -> what it identifies."""

# Exceptions: patterns of parameters, of whole sections and of entries. A new parameter decides every result until it is
# named here: a result that is made again for nothing costs time, one that is kept in spite of a change is wrong.
UNDECISIVE = ("resume", "output", "trust", "tracking", "starter", "evaluation.redraw", *BESIDE_FLOW)
"""Parameters of how results are written, and of other pipelines; the base model's digest stands for ``starter``."""
_TRAINING_ONLY = (
    *("seed", "train", "grpo", "alarm", "distributed", "evaluation.every", "evaluation.prompts", "evaluation.adapter"),
    "policy.signal_check",
    *(f"modules.*.{name}" for name in ("prompts_per_step", "group_size", "updates_per_rollout", "micro_batch_size")),
    *(f"modules.*.{name}" for name in ("learning_rate", "target_kl", "clip_low", "clip_high", "kl_weight")),
    "modules.*.advantage_epsilon",
)
_BASELINE_ONLY = tuple(
    f"evaluation.{name}" for name in ("images_per_prompt", "max_prompts", "controls", "bootstrap_samples")
)
UNREAD = {
    "baseline": (*UNDECISIVE, *_TRAINING_ONLY, "evaluation.bootstrap_samples"),
    "train": (*UNDECISIVE, "adapter", *_BASELINE_ONLY),
    "evaluate": (*UNDECISIVE, *_TRAINING_ONLY),
}
"""Pipeline -> parameters that change nothing in its result."""
UNREAD_BY_SAMPLES = (
    *(*UNREAD["baseline"], "adapter", "evaluation.batch_size", "modules"),
    # A total is computed again from the scores.
    *("reward", "rewards.*.weight", "rewards.*.max_failed_share"),
    # Digests stand for records and model.
    *(f"data.{name}" for name in DataConfig.model_fields if name not in ("height", "width")),
    *(f"model.{name}" for name in ModelConfig.model_fields if name not in ("dtype", "base_weights", "options")),
    *(f"policy.{name}" for name in PolicyConfig.model_fields if name != "flow"),
)
"""Parameters that may differ between a baseline and adapters that are compared with it, sample by sample."""
ROUNDING = (
    *("model.device", "model.offload", "grpo.micro_batch_size", "modules.*.micro_batch_size", "evaluation.batch_size"),
    *("policy.rollout_batch", "policy.denoise_batch", "policy.decode_batch", "policy.gradient_checkpointing"),
    *("model.attention", "model.compile", "distributed.processes", "distributed.sharded"),
)
"""Place, kernels and batch sizes of a computation: they change its rounding."""
CHANGED_BY_RESUME = (*UNREAD["train"], "evaluation.every", "grpo.non_finite", "alarm", *ROUNDING)
"""Parameters that a resumed training may change, beside ``grpo.steps`` where its schedule allows it."""
PLACES = ("data.path", "starter.dataset", "starter.model", "model.path", "train.start")
"""Parameters that name a place, whose content has a digest."""
OF_THE_COMMAND = ("evaluation", "tracking", "resume", "output", "adapter", "trust", "starter", *BESIDE_FLOW)
"""Sections that judging an adapter takes from the present command, not from its training; so `_MACHINE`."""
_MACHINE = {
    "data": ("max_pixels", "max_file_mb", "max_zip_ratio", "max_zip_files"),
    "model": ("device", "threads", "attention", "compile"),
    "policy": ("denoise_batch", "decode_batch", "rollout_batch"),
}


def record(config: Parameters, base_model: Mapping[str, Any], data: str, start: str | None = None) -> dict[str, Any]:
    """Returns what a result depends on; see `inputs`."""
    digests = inputs(config, base_model, data, start)
    return {"parameters": config.public(), **digests, **runtime(config.model, config.grpo)}


def inputs(
    config: Parameters, base_model: Mapping[str, Any], data: str, start: str | None = None
) -> dict[str, str | None]:
    """Returns the entries of a record beside parameters and `runtime`: digests of what is read.

    Args:
        base_model: the dataset ``base_model``.
        data: digest of the prepared records.
        start: digest of the adapters that a training starts from.
    """
    digests = {
        "model": base_model["model"],
        "model_digest": base_model["digest"],
        "model_content": base_model["content"],
        "data": data,
        "start": start,
        **code(config),
    }
    return {name: digest for name, digest in digests.items() if digest is not None}


def code(config: Parameters, *, hub: bool = True) -> dict[str, str]:
    """Returns the entries of the user's code, of files that options of rewards name, and of weights on the hub."""
    digests: dict[str, str] = {}
    commits = reward_commits(config.rewards) if hub else {}
    for name, reward in config.rewards.items():
        digests |= {f"{COMMIT}{name}: {option}": commit for option, commit in commits.get(name, {}).items()}
        digests |= {f"{FILE}{name}: {o}": found for o, found in option_files(reward.options, config.output).items()}
        digests |= {f"{CODE}{name}: {option}": found for option, found in option_code(reward.options).items()}
        if reward.function is not None:
            digests[f"{CODE}{name}"] = code_digest(reward.function)
    return digests | ({"family_code": code_digest(config.model.family)} if ":" in config.model.family else {})


def decisive(record: Provenance, ignoring: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the parameters that have a value, by their dotted names, and the digests of a record.

    Args:
        ignoring: patterns of names that are left out, with all below them; ``*`` is one part of a dotted name.
    """
    tree = record.get("parameters", {})
    values = flatten(tree) | {name: value for name, value in record.items() if _is_digest(name)}
    patterns = [pattern.split(".") for pattern in (*ignoring, *_transport(tree))]
    # A section of which nothing decides may be there or not.
    return {
        name: value
        for name, value in values.items()
        if value not in (None, {}) and not any(_begins(name.split("."), pattern) for pattern in patterns)
    }


def differences(before: Provenance, now: Provenance, ignoring: Sequence[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Returns the names of `decisive` that differ, in order, with both values; None = not there."""
    return _changes(decisive(before, ignoring), decisive(now, ignoring))


def _changes(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = sorted(first.keys() | second.keys())
    return {name: (first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)}


def described(different: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Returns a phrase for each difference: a parameter with both values, the meaning of a digest."""
    return [
        MEANING.get(name, name) if _is_digest(name) else f"{name} (was {before}, is {now})"
        for name, (before, now) in different.items()
    ]


def _is_digest(name: str) -> bool:
    return name in MEANING or name.startswith((CODE, FILE, COMMIT))


def _transport(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yields the options that rewards declare as their transport, such as a timeout, by their dotted names."""
    for name, reward in (tree.get("rewards") or {}).items():
        if isinstance(reward, Mapping):
            for option in sorted(transport_of(name, reward.get("function"))):
                yield f"rewards.{name}.options.{option}"


def _begins(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    pairs = zip(parts, pattern, strict=False)
    return len(pattern) <= len(parts) and all(fnmatchcase(part, wanted) for part, wanted in pairs)


def parameters_of_training(
    current: Mapping[str, Any], training: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the parameters of an adapter's training, with the command's own for what concerns judging.

    Args:
        current: the parameters of this command.
        training: those of the training.
        overrides: this command's ``--params``, which always count.
    """
    tree = {**training, **{name: current[name] for name in OF_THE_COMMAND}}
    for section, keys in _MACHINE.items():
        tree[section] = {**tree[section], **{key: current[section][key] for key in keys}}
    return merged(tree, overrides)


def without_scoring(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters with no more rewards than what paints answers, for a command that scores nothing."""
    kept = {n: entry for n, entry in tree["rewards"].items() if entry and is_negative_points(n, entry.get("function"))}
    modules = {name: entry and {**entry, "rewards": {}} for name, entry in tree["modules"].items()}
    return {**tree, "reward": AUTO, "rewards": kept, "modules": modules}


def code_notes(training: Provenance, now: Provenance) -> list[str]:
    """Returns a note where the code of a reward that judges ``now`` is not that of the training."""
    names = [name for name in now if name.startswith(CODE) and training.get(name, now[name]) != now[name]]
    changed = [name.removeprefix(CODE) for name in names]
    return [f"The code of reward {', '.join(changed)} has changed since the training."] if changed else []


# Results that are compared sample by sample.


def samples_record(spec: RunSpec, base_model: Mapping[str, Any], data: str) -> dict[str, Any]:
    """Returns what samples and scores depend on beside the adapters: names and values as of `decisive`."""
    config = spec.config
    unread = [*UNREAD_BY_SAMPLES, *(["sampling.rollout"] if len(spec.samplers) == 1 else [])]
    if not any(sampler.stochastic for sampler in spec.samplers.values()):
        unread.append("policy.flow")
    found = decisive({"parameters": config.public(), **inputs(config, base_model, data)}, unread)
    resolved = {"model.device": device_kind(config.model.device), "evaluation.controls": list(spec.controls)}
    return found | resolved


def require_pair(baseline: Mapping[str, Any], present: Mapping[str, Any], adapter: str | None = None) -> None:
    """Raises UserError with every difference of two `samples_record`; a baseline of more samples or controls pairs too.

    Args:
        adapter: the adapter that is evaluated with the parameters of its training; the baseline must be drawn with the
            same ones.
    """
    different = {
        name: (before, now)
        for name, (before, now) in _changes(baseline, present).items()
        if not (name in _EXTENT and _EXTENT[name](before, now))
    }
    if different:
        listed = "\n".join(f"  {phrase}" for phrase in described(different))
        raise UserError(
            f"the baseline does not pair with this run:\n{listed}\nDraw the baseline again.",
            remedy=Remedy("baseline", {} if adapter is None else {"adapter": adapter}),
        )


def _includes(drawn: int | None, asked: int | None) -> bool:
    """None = all."""
    return drawn is None or (asked is not None and asked <= drawn)


_EXTENT: Mapping[str, Callable[[Any, Any], bool]] = {
    "evaluation.images_per_prompt": _includes,
    "evaluation.max_prompts": _includes,
    "evaluation.controls": lambda drawn, asked: set(asked) <= set(drawn),
}
"""Parameter -> whether a baseline with the first value has all samples that the second asks for."""


def require_trained_on(training: Provenance, base_model: Mapping[str, Any], data: str) -> None:
    """Raises UserError if the adapter was trained on another base model, or on other data.

    On other data the held-out prompts may be among those that it was trained on.
    """
    if training["model_digest"] != base_model["digest"]:
        raise UserError(
            "the adapter was trained on another base model than the current one. Train again.", remedy="train"
        )
    if training.get("data", data) != data:
        raise UserError(
            "the adapter was trained on other data than the prepared records, so this is not its result. Train again,"
            " or compare it (ADAPTER: its folder or MLflow run) with the base model on the prompts that both hold out.",
            remedy=Remedy("compare", {"compare.second": "ADAPTER"}),
        )


# Source files, libraries and processor.

LIBRARIES = (
    *("accelerate", "diffusers", "numpy", "onnxruntime", "opencv-python-headless", "pandas", "peft", "pillow"),
    *("pytorch-msssim", "rapidfuzz", "rapidocr", "safetensors", "scikit-learn", "scipy", "tokenizers", "torch"),
    *("torchvision", "transformers"),
)
"""Libraries whose versions may change numbers."""
PACKAGE = Path(__file__).parent
_NO_RESULTS = ("operations", "tracking")
"""Packages that show, log or call, and decide nothing that is drawn or learned."""


def runtime(model: ModelConfig, grpo: GRPOConfig) -> dict[str, str]:
    """Returns the entries of `RUNTIME`: a digest of this package's files, and libraries and processor in words."""
    # bitsandbytes only where the model or the optimiser is computed with it: others need not have it.
    few_bits = (model.base_weights, grpo.optimizer) != ("full", "adamw")
    return {SOURCES: source_digest(), NUMERICS: _numerics(model.device, few_bits)}


def source_digest() -> str:
    """Returns 64 hex digits, others after an edit of a file that results may depend on."""
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


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "none"
