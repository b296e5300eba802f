"""LoRA adapters through peft: attach, switch off for the reference, merge for sampling, save, load.

The adapters of transformers' models are peft's own (``PeftModel``), those of diffusers' models are injected by
diffusers: so each loads by the plain call of the library that its module comes from.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from visual_grpo.command import again
from visual_grpo.config import LoraParams
from visual_grpo.errors import UserError
from visual_grpo.hardware import shards
from visual_grpo.hardware.quantised import QuantisedLinear


@contextlib.contextmanager
def three_kernels(layers: Sequence[Any]) -> Iterator[None]:
    """Inside the block peft's ``layers`` compute y = W x + b + s B (A x) with A and s B rounded to W's precision.

    The update's own precision falls to 8 bits (bfloat16), that of the sum stays what it is. Without gradient. Layers
    whose adapter is off are left alone.
    """
    changed = [layer for layer in layers if not layer.disable_adapters]
    try:
        for layer in changed:
            layer.forward = partial(_forward, layer.get_base_layer(), _factors(layer))
        yield
    finally:
        for layer in changed:
            layer.__dict__.pop("forward", None)


def _factors(layer: Any) -> list[tuple[Tensor, Tensor]]:
    """A^T [in, r] and s B^T [r, out] of each active adapter."""
    base = layer.get_base_layer()
    dtype = base.compute_dtype if isinstance(base, QuantisedLinear) else base.weight.dtype
    return [
        (
            layer.lora_A[name].weight.detach().t().to(dtype),
            (layer.lora_B[name].weight.detach() * layer.scaling[name]).t().to(dtype),
        )
        for name in layer.active_adapters
        if name in layer.lora_A
    ]


@torch.no_grad()
def _forward(base: Any, factors: Sequence[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    y: Tensor = base(x)
    flat = y.reshape(-1, y.shape[-1])
    for down, up in factors:
        flat = torch.addmm(flat, x.reshape(-1, x.shape[-1]) @ down, up)
    return flat.view(y.shape)


if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel

_PEFT_FILE = "adapter_model.safetensors"
_DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
_DIFFUSERS_CONFIG = "lora_adapter_metadata"


class Adapter(Protocol):
    """A module's LoRA."""

    def parameters(self) -> list[nn.Parameter]:
        """What is trained."""
        ...

    def disabled(self) -> contextlib.AbstractContextManager[object]:
        """The reference policy: the module without its adapter."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Its tensors by the names that peft saves."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Puts tensors of ``state`` back; every one must fit."""
        ...

    def save(self, folder: Path | str) -> None: ...


class PeftAdapter:
    """On a transformers model; saved as ``PeftModel.from_pretrained`` reads it."""

    def __init__(self, model: PeftModel) -> None:
        self.model = model

    @classmethod
    def attach(cls, base: PreTrainedModel, params: LoraParams, targets: str | list[str], seed: int) -> PeftAdapter:
        """Freezes ``base`` and adds a LoRA of zero effect (B = 0; arXiv 2106.09685), without dropout.

        ``targets`` are the modules that get one where ``params`` does not name them. A's initial values come from
        ``seed``; torch's own generator is left as it was.
        """
        from peft import get_peft_model

        base.requires_grad_(False)
        with _seeded(seed):
            return cls(get_peft_model(base, _config(params, targets)))

    @classmethod
    def load(cls, base: PreTrainedModel, folder: Path) -> PeftAdapter:
        """A saved adapter on a plain model, for sampling only."""
        from peft import PeftModel

        _require(folder / "adapter_config.json")
        with _loading(folder):
            return cls(PeftModel.from_pretrained(base, str(folder)))

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def disabled(self) -> contextlib.AbstractContextManager[object]:
        return _switched_off(self.model)

    def state(self) -> dict[str, Tensor]:
        return _state(self.model)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        _load_state(self.model, state, {})

    @classmethod
    def saved(cls, folder: Path) -> dict[str, Tensor]:
        """The `state` that `save` wrote."""
        return _saved(folder / _PEFT_FILE)

    def save(self, folder: Path | str) -> None:
        """``adapter_config.json`` and ``adapter_model.safetensors``."""
        self.model.save_pretrained(str(folder))


class DiffusersAdapter:
    """On a diffusers transformer; saved as ``transformer.load_lora_adapter(folder, prefix=None)`` reads it."""

    prefix: ClassVar[str | None] = None
    """What the names of saved tensors start with."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @classmethod
    def attach(cls, base: Any, params: LoraParams, targets: str | list[str], seed: int) -> Self:
        """As `PeftAdapter.attach`."""
        base.requires_grad_(False)
        with _seeded(seed):
            base.add_adapter(_config(params, targets))
        return cls(base)._in_single_precision()

    @classmethod
    def load(cls, base: Any, folder: Path) -> Self:
        """A saved adapter on a plain model, for sampling only."""
        _require(folder / _DIFFUSERS_FILE)
        with _loading(folder):
            base.load_lora_adapter(str(folder), prefix=cls.prefix, adapter_name="default", use_safetensors=True)
            if not hasattr(base, "peft_config"):  # diffusers only warns where it finds nothing.
                raise ValueError(f"no tensor's name starts with {cls.prefix}.")
        adapter = cls(base)._in_single_precision()
        adapter.load_state(cls.saved(folder))  # diffusers has rounded it to the model's precision.
        return adapter

    def _in_single_precision(self) -> Self:
        """As peft does itself for a PeftModel: updates vanish in half precision, and images become others."""
        from peft.tuners.lora import LoraLayer

        for layer in self.model.modules():
            if isinstance(layer, LoraLayer):
                for part in (layer.lora_A, layer.lora_B):
                    part.float()
        return self

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def disabled(self) -> contextlib.AbstractContextManager[object]:
        return _switched_off(self.model)

    def state(self) -> dict[str, Tensor]:
        return _state(self.model)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        _load_state(self.model, state, {"adapter_name": "default"})

    @classmethod
    def saved(cls, folder: Path) -> dict[str, Tensor]:
        """The `state` that `save` wrote."""
        start = f"{cls.prefix}." if cls.prefix else ""
        return {name.removeprefix(start): value for name, value in _saved(folder / _DIFFUSERS_FILE).items()}

    def save(self, folder: Path | str) -> None:
        """``pytorch_lora_weights.safetensors``, with the adapter's configuration in its metadata."""
        self.model.save_lora_adapter(str(folder))
        _rewrite(Path(folder) / _DIFFUSERS_FILE, self.prefix)


class PipelineAdapter(DiffusersAdapter):
    """On the transformer of a pipeline that loads adapters itself, by ``pipeline.load_lora_weights(folder)``."""

    prefix = "transformer"


@contextlib.contextmanager
def merged(model: nn.Module) -> Iterator[None]:
    """Any adapter of ``model`` folded into the weights while sampling: one matrix product instead of three.

    Afterwards the weights are put back from copies, since adding and subtracting would leave rounding behind. In half
    precision merging rounds the update away, and so it would in 8 or 4 bits, and sharded weights are gathered for one
    call at a time: there it is `three_kernels`.
    """
    layers = _layers(model)
    if shards.active() or not all(_is_mergeable(layer.get_base_layer()) for layer in layers):
        with three_kernels(layers):
            yield
        return
    originals = [layer.get_base_layer().weight.detach().clone() for layer in layers]
    try:
        for layer in layers:
            if not layer.disable_adapters:  # Such a one would unmerge itself in its call.
                layer.merge()
        yield
    finally:
        for layer, weight in zip(layers, originals, strict=True):
            layer.merged_adapters.clear()
            layer.get_base_layer().weight.data.copy_(weight)


@contextlib.contextmanager
def _switched_off(model: nn.Module) -> Iterator[None]:
    """As peft's ``disable_adapter``, for diffusers' models too, and leaves those off that are off already."""
    layers = [layer for layer in _layers(model) if not layer.disable_adapters]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _layers(model: nn.Module) -> list[Any]:
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def _is_mergeable(base: nn.Module) -> bool:
    return not isinstance(base, QuantisedLinear) and base.weight.dtype == torch.float32


def _config(params: LoraParams, default_targets: str | list[str]) -> LoraConfig:
    from peft import LoraConfig

    targets = params.target_modules if params.target_modules is not None else default_targets
    return LoraConfig(r=params.rank, lora_alpha=params.alpha, lora_dropout=0.0, target_modules=targets)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def _saved(file: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    _require(file)
    with _loading(file.parent):
        return load_file(file)


def _require(file: Path) -> None:
    if not file.is_file():
        raise UserError(f"{file.parent} holds no adapter (no {file.name}). Train one: {again('train')}")


@contextlib.contextmanager
def _loading(folder: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # Damaged, missing or of another model.
        raise UserError(
            f"The adapter in {folder} cannot be loaded: {error}\nMake it again: {again('train')}"
        ) from error


def _rewrite(file: Path, prefix: str | None) -> None:
    """Gives names and configuration their prefix, and makes equal adapters equal files.

    A pipeline reads only what has the prefix, and without the configuration it takes alpha to be the rank. diffusers
    writes several metadata entries, and the names in a set, in any order.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(file, framework="pt") as opened:
        config = json.loads(opened.metadata()[_DIFFUSERS_CONFIG])
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    start = f"{prefix}." if prefix else ""
    tensors, config = ({start + name: value for name, value in part.items()} for part in (load_file(file), config))
    save_file(tensors, file, metadata={_DIFFUSERS_CONFIG: json.dumps(config, sort_keys=True)})


def _state(model: Any) -> dict[str, Tensor]:
    from peft import get_peft_model_state_dict

    return {name: value.detach().clone() for name, value in get_peft_model_state_dict(model).items()}


def _load_state(model: Any, state: Mapping[str, Tensor], options: Mapping[str, str]) -> None:
    from peft import set_peft_model_state_dict

    expected = set(_state(model))
    if expected != set(state):
        odd = sorted(expected.symmetric_difference(state))[:3]
        raise UserError(f"The saved adapter does not fit this model: {odd} differ. Were policy.lora or model changed?")
    set_peft_model_state_dict(model, dict(state), **options)
