"""LoRA files of other programs, in the names of diffusers, kohya's scripts or ai-toolkit: read by diffusers' own
converters, and trained on (``train.start``) or merged into the base model (``model.lora``)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from visual_grpo.common.errors import UserError, counted
from visual_grpo.models.lora import Adapter, require_plain

_PREFIX = "transformer."
_PAIR = ("lora_A.weight", "lora_B.weight")
_OTHER_KINDS = {
    "dora_scale": "DoRA",
    "lokr_": "LoKr",
    "hada_": "LoHa",
    "lora_mid": "LoCon",
    "oft_": "OFT",
    "lora_magnitude": "DoRA",
    "diff_b": "LoRA with biases",
    ".diff.": "LoRA with whole weights",
    "lora_B.bias": "LoRA with biases",
}
"""Part of a tensor's name, with a dot at its end -> the kind of adapter that has it."""
_TEXT_ENCODER = re.compile(r"lora_te\d?_|text_encoders?(_\d)?\.|base_model\.model\.text_")
_MERGED = "merged_lora"
"""Attribute of a network that a LoRA was merged into."""
_CONVERTERS_RAISE = (ValueError, LookupError, AttributeError, TypeError, AssertionError, RuntimeError)


@dataclass(frozen=True, kw_only=True)
class LoraFile:
    """A LoRA by the names of the transformer's layers."""

    file: Path
    layers: Mapping[str, tuple[Tensor, Tensor]]
    """Name -> A [rank, inputs] and B [outputs, rank] in float32; the effect is B @ A."""

    @property
    def rank(self) -> int:
        """The largest of its layers."""
        return max(len(down) for down, _ in self.layers.values())

    def __str__(self) -> str:
        return f"the LoRA in {self.file} ({counted(len(self.layers), 'layer')}, rank {self.rank})"


def read_lora(pipeline_class: str, file: Path) -> LoraFile:
    """Reads a LoRA on the transformer of a pipeline, by the name of its class in diffusers.

    Raises UserError for a file that is not a LoRA in safetensors, or one that changes more than the transformer's
    layers; only `require_layers` recognises some LoRAs of a different model.
    """
    loader: Any = getattr(diffusers, pipeline_class, None)
    if not hasattr(loader, "lora_state_dict"):
        raise UserError(f"{file}: diffusers reads no LoRA files for a {pipeline_class}. {_ONLY}")
    _require_lora(file)
    try:
        state, *alphas, config = loader.lora_state_dict(
            str(file.parent),
            weight_name=file.name,
            use_safetensors=True,
            return_alphas=True,
            return_lora_metadata=True,
        )
        scale = _scale_of(config or {})
        pairs = _pairs(state)
        layers = {
            name: (down.float(), up.float() * (scale or _alpha(name, alphas, len(down)) / len(down)))
            for name, (down, up) in pairs.items()
        }
    except _CONVERTERS_RAISE as error:
        raise UserError(
            f"{file} is not a LoRA of a {pipeline_class} in names that diffusers converts"
            f" ({str(error) or repr(error)}). {_ONLY}"
        ) from error
    return LoraFile(file=file, layers=layers)


_ONLY = (
    "Expected a plain LoRA of this model's transformer, in safetensors, in the names of diffusers, kohya's scripts or"
    " ai-toolkit."
)


def merge(network: nn.Module, lora: LoraFile) -> None:
    """Adds ``lora`` to the weights of ``network``, each rounded once. Raises UserError as `require_layers` does."""
    require_layers(network, lora)
    for name, (down, up) in lora.layers.items():
        weight: Any = network.get_submodule(name).weight
        if not weight.is_meta:
            weight.data = (weight.data.float() + (up @ down).to(weight.device)).to(weight.dtype)
    setattr(network, _MERGED, lora.file)


def require_merged(networks: Mapping[str, nn.Module], named: str | None) -> None:
    """Raises UserError where ``model.lora`` names a LoRA that was merged into none of the ``networks``."""
    if named is not None and not any(hasattr(network, _MERGED) for network in networks.values()):
        raise UserError(
            f"model.lora is {named}, and this family has not merged it. Set model.lora to null; a family of your own"
            " calls visual_grpo.models.lora_files.merge in its load (load_pipeline does)."
        )


def start_from(adapter: Adapter, lora: LoraFile) -> None:
    """Gives the fresh ``adapter`` the effect of ``lora``: its layers begin with these matrices, filled up with fresh
    rows of A and zeros of B. Raises UserError as `require_fit` does."""
    require_fit(adapter, lora)
    config, state = adapter.model.peft_config["default"], adapter.state()
    for name, (down, up) in lora.layers.items():
        own_down, own_up = (state[f"{name}.{part}"] for part in _PAIR)
        own_down[: len(down)] = down.to(own_down)
        own_up[:, : len(down)] = (up * (config.r / config.lora_alpha)).to(own_up)
    adapter.load_state(state)


def require_layers(network: nn.Module, lora: LoraFile) -> None:
    """Raises UserError if ``lora`` is of a different model, or if diffusers has not converted its names."""
    for name, (down, up) in lora.layers.items():
        try:
            layer: Any = network.get_submodule(name)
        except AttributeError as error:
            raise UserError(f"{lora} is of a different model: {type(network).__name__} has no layer {name}.") from error
        if not hasattr(layer, "in_features"):
            kind = type(layer).__name__
            if hasattr(layer, "weight"):
                raise UserError(f"{lora} changes {name}, a {kind}; only Linear layers can be changed.")
            raise UserError(f"{lora} has names that diffusers does not convert: {name} is a {kind}. {_ONLY}")
        expected, found = (layer.in_features, layer.out_features), (down.shape[1], len(up))
        if found != expected:
            raise UserError(
                f"{lora} is of a different model: its layer {name} has {found[0]} inputs and {found[1]} outputs, that"
                f" of {type(network).__name__} has {expected[0]} and {expected[1]}."
            )


def require_fit(adapter: Adapter, lora: LoraFile) -> None:
    """Raises UserError where ``lora`` is of a different model, or the adapter has fewer layers or a lower rank."""
    network = adapter.model
    require_layers(network, lora)
    trained = {name for name, layer in network.named_modules() if isinstance(layer, LoraLayer)}
    lacking, rank = lora.layers.keys() - trained, network.peft_config["default"].r
    changes = [f"policy.lora.rank={lora.rank} (now {rank})"] if lora.rank > rank else []
    if lacking:
        names = sorted({re.sub(r"^.*?\.\d+\.", "", name) for name in {*lora.layers, *trained}})
        changes.append(f"policy.lora.target_modules=[{','.join(names)}], which adds {', '.join(sorted(lacking)[:2])}")
    if changes:
        raise UserError(
            f"{lora} has more layers or a higher rank than the adapter. Set {' and '.join(changes)}, or the same in"
            " modules.MODULE.lora where that is set. Or merge it into the model, and train a fresh adapter: name it as"
            " model.lora instead of train.start."
        )


def _require_lora(file: Path) -> None:
    """Raises UserError, from the names of the tensors alone, unless a file may be a plain LoRA of a transformer."""
    try:
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} is not an intact file in safetensors ({error}). Download it again.") from error
    if (text := next(filter(_TEXT_ENCODER.match, names), None)) is not None:
        raise UserError(f"{file} changes the text encoder too ({text}), which is not trained here. {_ONLY}")
    for part, kind in _OTHER_KINDS.items():
        if (other := next((name for name in names if part in f"{name}."), None)) is not None:
            raise UserError(f"{file} is a {kind} ({other}). {_ONLY}")
    if not any("lora" in name for name in names):
        shown = f"such as {names[0]}" if names else "none"
        raise UserError(f"{file} is not a LoRA: no tensor of it has lora in its name ({shown}). {_ONLY}")


def _pairs(state: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Name of a layer -> A and B. Raises ValueError for any other tensor."""
    found = defaultdict[str, dict[str, Tensor]](dict)
    for name, value in state.items():
        layer, part = _layer(name)
        if part is None or not name.startswith(_PREFIX):
            raise ValueError(f"unknown tensor {name}")
        found[layer.removeprefix(_PREFIX)][part] = value
    incomplete = [name for name, parts in found.items() if len(parts) != len(_PAIR)]
    if incomplete or not found:
        raise ValueError(f"half of a pair is missing: {', '.join(incomplete[:2])}" if found else "it is empty")
    return {name: (parts[_PAIR[0]], parts[_PAIR[1]]) for name, parts in found.items()}


def _layer(name: str) -> tuple[str, str | None]:
    part = next((part for part in _PAIR if name.endswith(f".{part}")), None)
    return (name, None) if part is None else (name.removesuffix(f".{part}"), part)


def _scale_of(config: Mapping[str, Any]) -> float | None:
    """alpha / rank of all layers, by the configuration that diffusers writes into its files; None without one."""
    own = {name.removeprefix(_PREFIX): value for name, value in config.items() if name.startswith(_PREFIX)}
    if not own:
        return None
    require_plain(own)
    return float(own["lora_alpha"] / own["r"])


def _alpha(layer: str, alphas: Iterable[Mapping[str, Any] | None], rank: int) -> float:
    """The alpha that a file has next to a layer (of FLUX.1; the other converters apply it); the rank without one."""
    for known in filter(None, alphas):
        for name, value in known.items():
            if name.removeprefix(_PREFIX) == f"{layer}.alpha":
                return float(torch.as_tensor(value))
    return float(rank)
