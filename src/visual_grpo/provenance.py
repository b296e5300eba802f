"""Provenance: what a result depends on, recorded once beside it, and how two records differ.

A record maps names to JSON values: ``parameters`` to the parameter tree, and the names of `MEANING` and of the rewards'
code and files to digests. training.json is a record with other entries beside; the metadata of a checkpoint and the
stamp of a baseline hold one as ``provenance``. What may differ between two of them is a table of patterns below.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from visual_grpo.common.device import device_kind, resolve_device
from visual_grpo.common.digests import option_files
from visual_grpo.common.errors import Remedy, UserError
from visual_grpo.common.importing import code_digest
from visual_grpo.config import BESIDE_FLOW, Parameters, RewardConfig, flatten, merged
from visual_grpo.config.adapter_folder import CODE, COMMIT, FILE
from visual_grpo.config.presets import pinned
from visual_grpo.models.run_spec import RunSpec
from visual_grpo.rewards.catalogue import reward_commits, transport_of

Record = Mapping[str, Any]

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
UNDECISIVE = ("resume", "output", "tracking", "starter", "evaluation.redraw", *BESIDE_FLOW)
"""Where and how results are written, and what other pipelines do; the base model's digest stands for ``starter``."""
_TRAINING_ONLY = (
    *("seed", "train", "grpo", "alarm", "distributed", "evaluation.every", "evaluation.prompts", "evaluation.adapter"),
    "policy.signal_check",
    *(f"modules.*.{name}" for name in ("prompts_per_step", "group_size", "updates_per_rollout", "micro_batch_size")),
    "modules.*.advantage_epsilon",
    *(f"modules.*.{name}" for name in ("learning_rate", "clip_low", "clip_high", "kl_weight")),
)
_BASELINE_ONLY = tuple(
    f"evaluation.{name}" for name in ("images_per_prompt", "max_prompts", "controls", "bootstrap_samples")
)
UNREAD = {
    "baseline": (*UNDECISIVE, *_TRAINING_ONLY, "evaluation.bootstrap_samples"),
    "train": (*UNDECISIVE, "adapter", *_BASELINE_ONLY),
    "evaluate": (*UNDECISIVE, *_TRAINING_ONLY),
}
"""Pipeline -> what changes nothing in its result."""
ROUNDING = (
    *("model.device", "model.offload", "grpo.micro_batch_size", "modules.*.micro_batch_size", "evaluation.batch_size"),
    *("policy.rollout_batch", "policy.denoise_batch", "policy.decode_batch", "policy.gradient_checkpointing"),
    *("distributed.processes", "distributed.sharded"),
)
"""Where and in how large parts something is computed."""
CHANGED_BY_RESUME = (*UNREAD["train"], "evaluation.every", "grpo.non_finite", "alarm", *ROUNDING)
"""What a resumed training may change, beside ``grpo.steps`` where its schedule allows it."""
PLACES = ("data.path", "starter.dataset", "starter.model", "model.path", "train.start")
"""Their contents have digests."""
OF_JUDGING = ("evaluation", "tracking", "resume", "output", "adapter", *BESIDE_FLOW)
"""Sections that judging an adapter takes from the present command, not from its training; so `_MACHINE`."""
_MACHINE = {"model": ("device", "threads"), "policy": ("denoise_batch", "decode_batch", "rollout_batch")}


def record(config: Parameters, base_model: Mapping[str, Any], data: str, start: str | None = None) -> dict[str, Any]:
    """Returns what a result depends on; see `inputs`."""
    return {"parameters": config.public(), **inputs(config, base_model, data, start), **runtime(config)}


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


def code(config: Parameters) -> dict[str, str]:
    """Returns the entries of the user's code, of files that options of rewards name, and of weights on the hub."""
    commits = reward_commits(config.rewards)
    return local_code(config) | {f"{COMMIT}{name}: {o}": c for name, found in commits.items() for o, c in found.items()}


def local_code(config: Parameters) -> dict[str, str]:
    """Returns what `code` does, without asking the hub."""
    digests = {f"{CODE}{name}": code for name, code in reward_codes(config.rewards).items()}
    for name, reward in config.rewards.items():
        digests |= {f"{FILE}{name}: {o}": found for o, found in option_files(reward.options, config.output).items()}
    return digests | _family_code(config)


def _family_code(config: Parameters) -> dict[str, str]:
    return {"family_code": code_digest(config.model.family)} if ":" in config.model.family else {}


def reward_codes(rewards: Mapping[str, RewardConfig]) -> dict[str, str]:
    """Returns the digest of the code of each reward that is not built in."""
    return {name: code_digest(reward.function) for name, reward in rewards.items() if reward.function is not None}


def decisive(record: Record, ignoring: Sequence[str] = ()) -> dict[str, Any]:
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


def differences(before: Record, now: Record, ignoring: Sequence[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Returns the names of `decisive` that differ, in order, with both values; None = not there."""
    first, second = decisive(before, ignoring), decisive(now, ignoring)
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


def parameters_to_judge(
    current: Mapping[str, Any], training: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the parameters of an adapter's training, with the command's own for what concerns judging.

    Args:
        current: the parameters of this command.
        training: those of the training.
        overrides: this command's ``--params``, which always count.
    """
    tree = {**pinned(training), **{name: current[name] for name in OF_JUDGING}}
    for section, keys in _MACHINE.items():
        tree[section] = {**tree[section], **{key: current[section][key] for key in keys}}
    return merged(tree, overrides)


def code_notes(training: Record, codes: Mapping[str, str]) -> list[str]:
    """Returns a note where the code that judges now (reward -> digest) is not that of the training."""
    changed = [name for name, code in codes.items() if training.get(f"{CODE}{name}", code) != code]
    return [f"The code of reward {', '.join(changed)} has changed since the training."] if changed else []


# What two results that are compared sample by sample must share.


def conditions(spec: RunSpec, base_model: Mapping[str, Any], data: str) -> dict[str, Any]:
    """Returns everything but the adapters that samples and scores depend on, as it is resolved for the model.

    Weights of rewards are left out: a total can be computed again from the scores.
    """
    config, tree = spec.config, spec.config.public()
    samplers = {"sampling": spec.samplers, "controls": spec.controls}
    commits = reward_commits(config.rewards)
    return {
        "seed": config.evaluation.seed,
        "model": {
            "digest": base_model["digest"],
            "content": base_model["content"],
            "dtype": config.model.dtype,
            "device": device_kind(config.model.device),
            "base_weights": config.model.base_weights,
            **_family_code(config),
        },
        "dataset": data,
        "data": {side: tree["data"][side] for side in ("height", "width")},
        **{
            kind: {name: sampler.model_dump(mode="json", exclude_none=True) for name, sampler in found.items()}
            for kind, found in samplers.items()
        },
        "flow": tree["policy"]["flow"] if any(sampler.stochastic for sampler in spec.samplers.values()) else None,
        "options": tree["model"]["options"],
        "rewards": {
            name: _reward_conditions(name, reward, config.output) | {"commits": commits.get(name, {})}
            for name, reward in tree["rewards"].items()
        },
        "evaluation": {name: tree["evaluation"][name] for name in ("images_per_prompt", "max_prompts")},
    }


def _reward_conditions(name: str, reward: Mapping[str, Any], output: str) -> dict[str, Any]:
    function = reward["function"]
    transport = transport_of(name, function)
    options = {option: value for option, value in reward["options"].items() if option not in transport}
    return {
        "function": function,
        "options": options,
        "clip": list(reward["clip"]),
        "only_where": reward["only_where"],
        "files": option_files(options, output),
        **({} if function is None else {"code": code_digest(function)}),
    }


def require_pair(baseline: Mapping[str, Any], present: Mapping[str, Any], adapter: str | None = None) -> None:
    """Raises UserError with every difference if the baseline was made under other `conditions`.

    A baseline with more samples or more controls than are asked for pairs too.

    Args:
        adapter: the adapter that is evaluated with the parameters of its training; the baseline must be drawn with the
            same ones.
    """
    before, now = flatten(_as_asked(baseline, present)), flatten(present)
    names = dict.fromkeys([*before, *now])
    # An empty section says nothing.
    different = [name for name in names if _value(before, name) != _value(now, name)]
    if different:
        listed = "\n".join(
            f"  {name}: {before.get(name, 'not set')} in the baseline, {now.get(name, 'not set')} now"
            for name in different
        )
        raise UserError(
            f"the baseline does not pair with this run:\n{listed}\nDraw the baseline again.",
            remedy=Remedy("baseline", {} if adapter is None else {"adapter": adapter}),
        )


def _value(conditions: Mapping[str, Any], name: str) -> Any:
    value = conditions.get(name)
    return None if value == {} else value


def _as_asked(baseline: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """Drops controls and samples that the baseline has beyond those that are asked for."""
    drawn = dict(baseline)
    if "controls" in drawn and "controls" in present:
        drawn["controls"] = {name: s for name, s in drawn["controls"].items() if name in present["controls"]}
    if "evaluation" in drawn and "evaluation" in present:
        before, asked = drawn["evaluation"], present["evaluation"]
        more = {key: asked[key] for key in asked if key in before and _includes(before[key], asked[key])}
        drawn["evaluation"] = {**before, **more}
    return drawn


def _includes(drawn: int | None, asked: int | None) -> bool:
    """None = all."""
    return drawn is None or (asked is not None and asked <= drawn)


def require_trained_on(training: Record, base_model: Mapping[str, Any], data: str) -> None:
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
    *("accelerate", "diffusers", "numpy", "onnxruntime", "opencv-python", "pandas", "peft", "pillow"),
    *("pytorch-msssim", "rapidfuzz", "rapidocr", "safetensors", "scikit-learn", "scipy", "tokenizers", "torch"),
    *("torchvision", "transformers"),
)
"""Libraries whose versions may change numbers."""
PACKAGE = Path(__file__).parent
_NO_RESULTS = ("operations", "tracking")
"""Packages that show, log or call, and decide nothing that is drawn or learned."""


def runtime(config: Parameters) -> dict[str, str]:
    """Returns the entries of `RUNTIME`: a digest of this package's files, and libraries and processor in words."""
    # bitsandbytes only where the model or the optimiser is computed with it: others need not have it.
    few_bits = (config.model.base_weights, config.grpo.optimizer) != ("full", "adamw")
    return {SOURCES: source_digest(), NUMERICS: _numerics(config.model.device, few_bits)}


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
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    if device.type == "cuda":
        processor += f" {torch.cuda.get_device_name(device)}"
    return ", ".join([f"python {platform.python_version()}", *versions, f"{device.type} {processor}"])


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "none"


_COMMIT = re.compile(r"[0-9a-f]{40}")


def base_model_is_known(revision: str | None, base_model: Mapping[str, Any]) -> bool:
    """Returns False for a model on the hub whose revision names no commit: its files may be others by now."""
    return base_model["content"] is not None or _COMMIT.fullmatch(revision or "") is not None
