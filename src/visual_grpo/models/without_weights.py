"""Networks with their weights, each tensor of them; or from their configuration files alone, for a plan (on the meta
device) and for measurements (random ones)."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from diffusers import pipelines
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from visual_grpo.common.errors import UserError

_device: str | None = None
_SHOWN = 3
"""Tensors that a message names."""


@contextmanager
def without_weights(device: str) -> Iterator[None]:
    """Has families load models without their weights inside: random ones on ``device``, or none on ``meta``."""
    global _device
    before, _device = _device, device
    try:
        yield
    finally:
        _device = before


def networks_of(
    described: Mapping[str, Any], folder: str | Path, dtype: torch.dtype, in_float32: Collection[str] = ()
) -> dict[str, nn.Module]:
    """Returns the networks among a pipeline's parts (name -> library and class); without weights inside
    `without_weights`. They have ``dtype``, but those named ``in_float32``.

    Raises ValueError for files that are not the weights of their class.
    """
    classes = {name: class_of(library, kind) for name, (library, kind) in described.items()}
    for name in classes:
        _require_unquantized(Path(folder, name))
    networks = {}
    for name, kind in classes.items():
        if issubclass(kind, nn.Module):
            place, own = Path(folder, name), torch.float32 if name in in_float32 else dtype
            if _device is None:
                networks[name] = _whole(kind.from_pretrained, place, own)
            else:
                networks[name] = network_of(kind, place, own, _device)
    return networks


def class_of(library: str, kind: str) -> Any:
    """Returns the class of a pipeline's part, as its description names it."""
    return getattr(getattr(pipelines, library, None) or import_module(library), kind)


def load_network(auto_class: Any, folder: str | Path, dtype: torch.dtype) -> Any:
    """Calls ``auto_class.from_pretrained`` of transformers; reads no weights inside `without_weights`.

    Raises ValueError for files that are not the weights of their class.
    """
    _require_unquantized(Path(folder))
    if _device is None:
        # By default the user is asked whether to run a model's code.
        return _whole(auto_class.from_pretrained, Path(folder), dtype, trust_remote_code=False)
    configuration = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    build = partial(auto_class.from_config, configuration, trust_remote_code=False)
    return _generating(frozen(build, dtype, _device), Path(folder))


def _require_unquantized(folder: Path) -> None:
    """A LoRA on weights of few bits would be computed in their integers, and their libraries are not installed."""
    file = folder / "config.json"
    configuration = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if quantized := configuration.get("quantization_config"):
        raise UserError(
            f"The weights in {folder} are quantised already ({quantized.get('quant_method', 'in an unknown way')})."
            " Name the model in its original precision as model.path, and set model.base_weights to 8bit or 4bit."
        )


def _whole(load: Callable[..., Any], folder: Path, dtype: torch.dtype, **given: Any) -> Any:
    """Calls the ``from_pretrained`` of diffusers or transformers, which gives what it does not find random values."""
    network, report = load(
        folder, dtype=dtype, use_safetensors=True, ignore_mismatched_sizes=True, output_loading_info=True, **given
    )
    parts = {name for name, _ in network.named_children()}
    # What is outside of the network's own parts is the head of a different class, as of a language model whose
    # inner layers encode prompts.
    surplus = [key for key in report["unexpected_keys"] if key.partition(".")[0] in parts]
    shapes = [f"{key} ({list(saved)} for {list(own)})" for key, saved, own in report["mismatched_keys"]]
    faults = {"lacks": report["missing_keys"], "has in a different shape": shapes, "has in addition": surplus}
    told = [f"{what} {_named(keys)}" for what, keys in faults.items() if keys]
    if told:
        kind = type(network).__name__
        raise ValueError(f"the weights in {folder} are not those of the {kind} that it describes: it {'; '.join(told)}")
    return network


def _named(keys: Iterable[str]) -> str:
    first = sorted(keys)
    return ", ".join(first[:_SHOWN]) + (f" and {len(first) - _SHOWN} more" if len(first) > _SHOWN else "")


def network_of(kind: Any, folder: Path, dtype: torch.dtype, device: str) -> Any:
    """Builds a network of diffusers or transformers, frozen, on ``device``."""
    if not issubclass(kind, PreTrainedModel):
        configuration = kind.load_config(folder)
        return frozen(lambda: kind.from_config(configuration), dtype, device)
    return _generating(frozen(lambda: kind(kind.config_class.from_pretrained(folder)), dtype, device), folder)


def _generating(network: Any, folder: Path) -> Any:
    if (folder / "generation_config.json").is_file():
        network.generation_config = GenerationConfig.from_pretrained(folder)
    return network


def frozen(build: Callable[[], Any], dtype: torch.dtype, device: str = "meta") -> Any:
    """Calls ``build``; gives parameters and buffers the dtypes that ``from_pretrained`` would."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            module = build()
    finally:
        torch.set_default_dtype(before)
    kept = tuple(getattr(module, "_keep_in_fp32_modules", None) or ()) if dtype == torch.float16 else ()
    for name, part in module.named_modules():
        for parameter in part.parameters(recurse=False):  # A network inside may have its configuration's dtype.
            parameter.data = parameter.data.to(dtype)
        for key, buffer in part.named_buffers(recurse=False):
            if buffer.is_floating_point() and key not in part._non_persistent_buffers_set:
                part.register_buffer(key, buffer.to(dtype))
        if any(key in name.split(".") for key in kept):
            part.float()
    return module.eval().requires_grad_(False)
