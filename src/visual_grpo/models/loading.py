"""Loading saved models with clear errors, and telling what a saved model is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
from safetensors import SafetensorError

from visual_grpo.common.device import resolve_device
from visual_grpo.common.digests import may_be_hub_id
from visual_grpo.common.errors import UserError
from visual_grpo.common.quiet_libraries import hidden_progress_bars
from visual_grpo.config import ModelConfig
from visual_grpo.grpo.distributed import sharding
from visual_grpo.models.hub import MODEL_FILE, PIPELINE_FILE, missing_vocabulary, model_file, read_described
from visual_grpo.models.lora_files import merge, read_lora
from visual_grpo.models.lora_lookup import merged_lora
from visual_grpo.models.offload import enable_offload
from visual_grpo.models.quantized import check_base_weights, quantize
from visual_grpo.models.without_weights import networks_of

_POINTER = "adapter_config.json"
"""The file by which transformers loads the model that it names, which may be on the hub, with an adapter."""

_DAMAGED = (OSError, ValueError, AttributeError, ImportError, LookupError, TypeError, SafetensorError)
"""What the model libraries raise for files that are not a model's."""
_OF_TRANSFORMERS = ["*.json", "*.txt", "*.jinja", "*.model", "model*.safetensors"]
"""Files that a model of transformers is loaded from."""


def load_pipeline(
    pipeline_class: str,
    path: str,
    config: ModelConfig,
    *,
    optional: Sequence[str] = (),
    without: Sequence[str] = (),
    in_float32: Sequence[str] = (),
    prepare: Callable[[Any], object] = lambda pipeline: None,
) -> Any:
    """A diffusers pipeline by plain ``from_pretrained``: frozen, in evaluation mode, on the device.

    Args:
        pipeline_class: its name in diffusers.
        optional: components that a saved pipeline may lack, in addition to those that diffusers knows of.
        without: components that are not loaded even where they are there.
        in_float32: components that are read in float32 whatever ``config.dtype`` is.
        prepare: what is done to the pipeline before its networks are on the device.

    Raises UserError for a scheduler that does not take Euler's steps: the SDE's steps have these as their mean.
    """
    device = resolve_device(config.device)
    check_base_weights(config.base_weights, device)
    loader = getattr(diffusers, pipeline_class)
    with loading(path):
        # diffusers loads a pipeline that was saved without a component only where it is told so.
        described = _described(path, config.revision)
        absent = {name for name in optional if described.get(name) == [None, None]}.union(without)
        left_out = dict.fromkeys(sorted(absent))
        folder = Path(path)
        if not folder.is_dir():
            folder = Path(loader.download(path, revision=config.revision, use_safetensors=True, **left_out))
        named = {name for name, entry in described.items() if isinstance(entry, list) and any(entry)} - absent
        with hidden_progress_bars():
            if missing := [name for name in sorted(named) if not (folder / name).is_dir()]:
                raise FileNotFoundError(f"it lacks {', '.join(missing)}.")  # transformers makes up a missing tokenizer.
            dtype = getattr(torch, config.dtype)
            networks = networks_of({name: described[name] for name in named}, folder, dtype, in_float32)
            pipeline = loader.from_pretrained(folder, dtype=dtype, use_safetensors=True, **networks, **left_out)
        for name, part in pipeline.components.items():
            check_tokenizer(part, folder / name)
    pipeline.set_progress_bar_config(disable=True)
    networks = {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    for network in networks.values():
        network.eval().requires_grad_(False)
    prepare(pipeline)
    _require_euler(path, pipeline.scheduler)
    kept = torch.device("cpu") if config.offload != "none" and device.type != "meta" else device
    if config.lora is not None:
        merge(pipeline.transformer, read_lora(pipeline_class, merged_lora(config.lora)))
    # The VAE's convolutions and pixels need their precision.
    frozen = {name: network for name, network in networks.items() if name != "vae"}
    quantize(frozen, config.base_weights, device, kept=kept)
    place(networks, device, config.offload)
    return pipeline


def _require_euler(path: str, scheduler: Any) -> None:
    kind, euler = type(scheduler).__name__, FlowMatchEulerDiscreteScheduler.__name__
    changes = {name: False for name in ("stochastic_sampling", "invert_sigmas") if scheduler.config.get(name)}
    if kind != euler or changes:
        others = "".join(f", {name}=False" for name in changes) + ")"
        if "shift" not in scheduler.config:
            others = ", shift=SHIFT), where SHIFT is the value of the model's authors"
        raise UserError(
            f"The scheduler of {path!r} is {' with '.join([kind, *changes])}; training takes the steps of {euler}."
            f" Save the pipeline with pipeline.scheduler = {euler}.from_config(pipeline.scheduler.config{others}."
        )


def place(networks: Mapping[str, Any], device: torch.device, offload: str = "none") -> None:
    """Puts the frozen ``networks`` on ``device``: whole, in turns, or this process's part of them (`sharding`)."""
    if sharding.active():
        sharding.shard(networks, device)
    elif offload != "none":
        enable_offload(networks, device)
    else:
        for network in networks.values():
            network.to(device)


def downloaded(path: str, revision: str | None) -> Path:
    """Returns the folder with a model of transformers: ``path``, or what is downloaded of a hub id."""
    if Path(path).is_dir():
        return Path(path)
    ignored = ["*/*", "model.*.safetensors"]  # Other formats, and variants such as model.fp16.safetensors.
    return Path(snapshot_download(path, revision=revision, allow_patterns=_OF_TRANSFORMERS, ignore_patterns=ignored))


def check_tokenizer(part: Any, folder: Path) -> None:
    """Raises FileNotFoundError for a tokenizer, or a processor's, whose vocabulary is not in ``folder``."""
    tokenizer = getattr(part, "tokenizer", part)
    if lacking := missing_vocabulary(type(tokenizer), lambda name: (folder / name).is_file()):
        raise FileNotFoundError(f"{folder} has no vocabulary for its {type(tokenizer).__name__}: {lacking}.")


@contextmanager
def loading(path: str) -> Iterator[None]:
    """Turns errors of the hub's client and of the model libraries into a UserError."""
    try:
        if pointers := [*Path(path).glob(_POINTER), *Path(path).glob(f"*/{_POINTER}")]:
            raise ValueError(f"{pointers[0]} names a different model, to which it belongs. Merge the two.")
        yield
    except HTTPError as error:
        raise UserError(
            f"The download of the model {path!r} broke off: {str(error).strip() or type(error).__name__}\nStart the"
            " command again: it continues with the files that are still missing."
        ) from error
    except _DAMAGED as error:
        kind = f"{type(error).__name__} " if isinstance(error, (ImportError, LookupError, TypeError)) else ""
        raise UserError(
            f"The model {path!r} cannot be loaded: {kind}{error}\n"
            "A hub id needs a network or a download made before; a folder must be complete: each component with its"
            " configuration and its whole .safetensors files."
        ) from error


def saved_class(path: str, revision: str | None = None) -> str | None:
    """The class that a saved model's folder or hub id names; None where it names none.

    Raises UserError where nothing can be read at ``path``.
    """
    described = _described(path, revision)
    return described.get("_class_name") or next(iter(described.get("architectures") or []), None)


def _described(path: str, revision: str | None) -> Mapping[str, Any]:
    here = (Path(path) / name for name in (PIPELINE_FILE, MODEL_FILE))
    file = model_file(path, revision) if may_be_hub_id(path) else next(filter(Path.is_file, here), None)
    if file is None:
        holds = f"holds neither {PIPELINE_FILE} nor {MODEL_FILE}" if Path(path).exists() else "does not exist"
        raise UserError(
            f"model.path is {path}, which {holds}; expected a folder saved by"
            " save_pretrained, a hub id that is reachable or downloaded, or null for the starter's model."
        )
    return read_described(file)
