"""LoRA adapters through peft: attach, switch off for the reference, save, load.

The adapters of transformers' models are peft's own (``PeftModel``), adapters of diffusers' models are injected by
diffusers: so each loads by the plain call of the library that its module comes from.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from diffusers.utils import recurse_remove_peft_layers
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.constants import INCLUDE_LINEAR_LAYERS_SHORTHAND
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from visual_grpo.common.errors import UserError
from visual_grpo.common.files import follow_umask
from visual_grpo.common.types import Policy
from visual_grpo.config import LoraParams
from visual_grpo.models.lora_layers import compute_in_base_precision, lora_layers

T = TypeVar("T")

_DIFFUSERS_CONFIG = "lora_adapter_metadata"
_PLAIN = {
    *("r", "lora_alpha", "target_modules", "lora_dropout", "peft_type", "task_type", "inference_mode"),
    *("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "eva_config"),
}
"""Keys of peft's configuration that a plain LoRA may set."""
_BASE_KEPT = ("gaussian", "orthogonal", "eva", "mica")
"""Values of init_lora_weights that decide how A and B begin, and leave the base weights as they are: of the others
(pissa, olora, corda, loftq, lora_ga), a file is a difference from weights that only its training had."""
_BLOCK = re.compile(r"blocks\.\d+\.")
_UNUSABLE = (OSError, ValueError, RuntimeError, TypeError, AttributeError, LookupError)


class Adapter(ABC):
    """A module's LoRA on ``model``; a subclass puts it on and saves it in its library's format."""

    file: ClassVar[str]
    """The name of the file of saved weights."""
    plain: ClassVar[str]
    """A line that loads the folder ``folder`` without this package."""
    within: ClassVar[str] = ""
    """The part of the model that a policy runs with the adapter; "" = all of it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        compute_in_base_precision(model)

    @classmethod
    def attach(cls, base: Any, params: LoraParams, targets: str | list[str], seed: int) -> Self:
        """Freezes ``base`` and adds a LoRA of zero effect (B = 0; arXiv 2106.09685), without dropout.

        ``targets`` are the modules that get one where ``params`` does not name them. A's initial values come from
        ``seed``; torch's own generator is left unchanged.
        """
        _remove_adapter(base)
        if params.target_modules is not None:
            targets = _checked_targets(base, params.target_modules, cls.within)
        config = LoraConfig(r=params.rank, lora_alpha=params.alpha, lora_dropout=0.0, target_modules=targets)
        base.requires_grad_(False)
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            return cls._add(base, config)

    @classmethod
    @abstractmethod
    def _add(cls, base: Any, config: LoraConfig) -> Self:
        """Adds the LoRA to a frozen model."""

    @classmethod
    @abstractmethod
    def load(cls, base: Any, folder: Path) -> Self:
        """Puts a saved adapter on a plain model, for sampling only."""

    @classmethod
    def saved(cls, folder: Path) -> dict[str, Tensor]:
        """The `state` that `save` wrote."""
        with _loading(folder, cls.file):
            return load_file(folder / cls.file)

    def restore(self, folder: Path) -> None:
        """Puts saved weights of the same LoRA on."""
        self.load_state(self.saved(folder))

    @abstractmethod
    def save(self, folder: Path | str) -> None:
        """Writes `file` and the adapter's configuration."""

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The reference policy: the module without its adapter. Layers that are off already are left off."""
        layers = [layer for layer in lora_layers(self.model) if not layer.disable_adapters]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    def state(self) -> dict[str, Tensor]:
        """Its tensors by the names that peft saves; copies, which training does not change."""
        # By default peft asks the hub for the base model that the adapter's configuration names.
        state = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        return {name: value.detach().clone() for name, value in state.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Puts tensors of ``state`` back; every one must fit."""
        odd = sorted(set(self.state()).symmetric_difference(state))[:3]
        if odd:
            raise UserError(
                f"The saved adapter does not fit this model: {odd} differ. Was policy.lora or model changed?"
            )
        set_peft_model_state_dict(self.model, dict(state), adapter_name="default")


class PeftAdapter(Adapter):
    """A LoRA on a transformers model; saved as ``PeftModel.from_pretrained`` reads it."""

    file = "adapter_model.safetensors"
    plain = "peft.PeftModel.from_pretrained(model, folder)  # of GLM-Image: pipe.vision_language_encoder"
    within = "model.language_model"

    @classmethod
    def _add(cls, base: Any, config: LoraConfig) -> Self:
        return cls(get_peft_model(base, config))

    @classmethod
    def load(cls, base: Any, folder: Path) -> Self:
        # Without this file, peft would read a pickle, or look for the folder's name on the hub.
        with _loading(folder, "adapter_config.json"), _loading(folder, cls.file):
            stated = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
            if stated.get("peft_type") != "LORA":  # Other kinds name further adapters, which may be on the hub.
                raise ValueError(f"its peft_type is {stated.get('peft_type')!r}; expected LORA")
            require_plain(stated)
            # Policies of tokens read neither through a LoRA (`TokenModel.head`, `fast_lora`).
            if unread := [name for name in cls.saved(folder) if ".lm_head." in name or ".lora_embedding_" in name]:
                raise ValueError(f"it changes the output head or the embeddings ({unread[0]})")
            _remove_adapter(base)
            return cls(PeftModel.from_pretrained(base, str(folder)))

    def save(self, folder: Path | str) -> None:
        self.model.save_pretrained(str(folder), save_embedding_layers=False)


class DiffusersAdapter(Adapter):
    """A LoRA on a diffusers transformer; saved as ``transformer.load_lora_adapter(folder, prefix=None)`` reads it."""

    file = "pytorch_lora_weights.safetensors"
    plain = "pipe.transformer.load_lora_adapter(folder, prefix=None, use_safetensors=True)"
    prefix: ClassVar[str] = ""
    tensor_prefix: ClassVar[str] = ""
    """``prefix`` and ``tensor_prefix`` precede the names of the configuration and of the tensors in the file."""
    parts: ClassVar[Mapping[str, str]] = {}
    """Name of a layer, within its block -> its name in the file; the others have the same name there."""

    @classmethod
    def _add(cls, base: Any, config: LoraConfig) -> Self:
        base.add_adapter(config)
        return cls(base)._in_single_precision()

    @classmethod
    def load(cls, base: Any, folder: Path) -> Self:
        with _loading(folder, cls.file):
            config = {name.removeprefix(cls.prefix): value for name, value in _config(folder / cls.file).items()}
            require_plain(config)
            _remove_adapter(base)
            base.load_lora_adapter(cls.saved(folder), prefix=None, adapter_name="default", metadata=config)
            if not hasattr(base, "peft_config"):  # diffusers only warns where it finds nothing.
                raise ValueError("it has no tensors for this module")
        adapter = cls(base)._in_single_precision()
        adapter.restore(folder)  # diffusers has rounded it to the model's precision.
        return adapter

    def restore(self, folder: Path) -> None:
        own = self.model.peft_config["default"]
        with _loading(folder, self.file):
            scale = _scale(_config(folder / self.file)) / (own.lora_alpha / own.r)
        self.load_state(_scaled(self.saved(folder), scale))

    def _in_single_precision(self) -> Self:
        """Keeps the LoRA in float32, as peft does for a PeftModel: half precision would round updates away."""
        for layer in lora_layers(self.model):
            layer.lora_A.float()
            layer.lora_B.float()
        return self

    @classmethod
    def saved(cls, folder: Path) -> dict[str, Tensor]:
        parts = {in_file: name for name, in_file in cls.parts.items()}
        saved = super().saved(folder)
        return {_renamed(name.removeprefix(cls.tensor_prefix), parts): value for name, value in saved.items()}

    def save(self, folder: Path | str) -> None:
        """Gives the file alpha equal to the rank, with the scale in B: what does not read the configuration, as
        ComfyUI, takes alpha to be the rank. It names no default of peft's, which an earlier peft may not know. Equal
        adapters are equal files: diffusers writes several entries of metadata, and the names in a set, in any order."""
        self.model.save_lora_adapter(str(folder))
        file = Path(folder) / self.file
        usual = LoraConfig().to_dict() | {"r": None, "lora_alpha": None}
        config = {name: value for name, value in _config(file).items() if value != usual.get(name)}
        tensors = _scaled(load_file(file), _scale(config))
        config["lora_alpha"] = config["r"]
        if isinstance(config["target_modules"], list):
            config["target_modules"].sort()
        tensors = {f"{self.tensor_prefix}{_renamed(name, self.parts)}": value for name, value in tensors.items()}
        told = json.dumps({f"{self.prefix}{name}": value for name, value in config.items()}, sort_keys=True)
        save_file(tensors, file, metadata={_DIFFUSERS_CONFIG: told})


class PipelineAdapter(DiffusersAdapter):
    """A LoRA on the transformer of a pipeline that loads adapters itself, by ``pipeline.load_lora_weights(folder)``."""

    plain = "pipe.load_lora_weights(folder)"
    prefix = tensor_prefix = "transformer."


class OriginalAdapter(PipelineAdapter):
    """A file whose tensors have the names of the model's authors, as diffusers and ComfyUI read them.

    ComfyUI (comfy/lora.py) has no other names for Wan and LTX-Video.
    """

    tensor_prefix = "diffusion_model."


class AdapterPolicy(Policy[T]):
    """A policy whose trainable parameters are one adapter."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter

    @property
    def dtype(self) -> str:
        """The narrowest floating-point precision of the frozen weights."""
        frozen = {p.dtype for p in self.adapter.model.parameters() if not p.requires_grad}
        return next((name for name in ("float16", "bfloat16") if getattr(torch, name) in frozen), "float32")

    def trainable_parameters(self) -> list[nn.Parameter]:
        return self.adapter.parameters()

    def adapter_state_dict(self) -> dict[str, Tensor]:
        return self.adapter.state()

    def load_adapter_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.adapter.load_state(state)

    def save_adapter(self, folder: Path | str) -> None:
        self.adapter.save(folder)
        follow_umask(Path(folder) / self.adapter.file)


def _remove_adapter(base: Any) -> None:
    """Leaves ``base`` without an earlier LoRA: diffusers replaces none, and peft only the layers of the new one."""
    if hasattr(base, "peft_config"):
        recurse_remove_peft_layers(base)
        del base.peft_config
        base._hf_peft_config_loaded = False  # Which diffusers asks before it looks for peft_config.


def _checked_targets(base: nn.Module, targets: str | list[str], within: str) -> str | list[str]:
    """Returns the ``targets`` of a user, or their layers ``within`` a part of ``base`` where they name others too.

    Raises UserError unless each names layers there, and Linear ones alone.
    """
    layers = {name: layer for name, layer in base.named_modules() if name}
    linear = {name for name, layer in layers.items() if isinstance(layer, nn.Linear)}
    inside = {name for name in linear if name.startswith(within)}
    if targets == INCLUDE_LINEAR_LAYERS_SHORTHAND:
        return sorted(inside) if within else targets
    # As a target: without the number of its block.
    known = sorted({re.sub(r"^.*?\.\d+\.", "", name) for name in inside})
    named: set[str] = set()
    for target in [targets] if isinstance(targets, str) else targets or [""]:
        config = LoraConfig(target_modules=target if isinstance(targets, str) else [target])
        try:
            found = [name for name in layers if check_target_module_exists(config, name)]
        except re.error as error:
            raise UserError(
                f"policy.lora.target_modules: {target!r} is not a valid regular expression: {error}"
            ) from error
        if linear.issuperset(found) and inside.intersection(found):
            named.update(found)
            continue
        part = f" in {within}" if within else ""
        other = next((name for name in found if name not in linear), *found[:1] or [None])
        is_what = "no layer" if other is None else f"{other} ({type(layers[other]).__name__})"
        raise UserError(
            f"policy.lora.target_modules (or modules.NAME.lora): {target!r} names {is_what} of {type(base).__name__};"
            f" expected a list of ends of names of Linear layers{part}, or a regular expression of whole names."
            f" It has {', '.join(known)}."
        )
    return targets if named <= inside else sorted(named & inside)


@contextmanager
def _loading(folder: Path, file: str) -> Iterator[None]:
    """Raises UserError where the adapter in ``folder`` has no ``file``, or cannot be loaded."""
    if not (folder / file).is_file():
        raise UserError(f"{folder} holds no adapter (no {file}). Train one.", remedy="train")
    try:
        yield
    except (*_UNUSABLE, SafetensorError) as error:  # Damaged, or of a different model.
        raise UserError(f"The adapter in {folder} cannot be loaded: {error}\nTrain again.", remedy="train") from error


def require_plain(stated: Mapping[str, Any]) -> None:
    """Raises ValueError unless peft's configuration is a plain LoRA: other kinds import modules or read files."""
    usual = LoraConfig().to_dict()
    if stated.get("init_lora_weights") in _BASE_KEPT:
        usual["init_lora_weights"] = stated["init_lora_weights"]
    other = [name for name, value in stated.items() if name not in _PLAIN and value and value != usual.get(name)]
    if other:
        raise ValueError(f"its configuration sets {', '.join(sorted(other))}; expected a LoRA without")
    rank, alpha, targets = (stated.get(name) for name in ("r", "lora_alpha", "target_modules"))
    names = [targets] if isinstance(targets, str) else targets
    if not (isinstance(rank, int) and rank > 0 and isinstance(alpha, int | float) and alpha > 0 and names):
        raise ValueError(f"its r, lora_alpha and target_modules are {rank!r}, {alpha!r} and {targets!r}")


def _renamed(tensor: str, parts: Mapping[str, str]) -> str:
    """The name of a LoRA's tensor where ``parts`` rename layers within their blocks."""
    layer, lora, rest = tensor.partition(".lora_")
    block = _BLOCK.match(layer)
    start, name = ("", layer) if block is None else (block[0], layer[block.end() :])
    return f"{start}{parts.get(name, name)}{lora}{rest}"


def _config(file: Path) -> dict[str, Any]:
    """peft's configuration in a file of diffusers, by names that may have a prefix."""
    with safe_open(file, framework="pt") as opened:
        text = (opened.metadata() or {}).get(_DIFFUSERS_CONFIG)
    if text is None:
        raise ValueError(f"it has no {_DIFFUSERS_CONFIG}, which diffusers and this project write")
    config: dict[str, Any] = json.loads(text)
    return config


def _scale(config: Mapping[str, Any]) -> float:
    (alpha,), (rank,) = ([config[key] for key in config if key.split(".")[-1] == name] for name in ("lora_alpha", "r"))
    return float(alpha / rank)


def _scaled(state: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    return {name: value * scale if ".lora_B." in name else value for name, value in state.items()}
