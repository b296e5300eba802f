"""The LoRA adapters of one model, by the names of its modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from visual_grpo.config import LoraParams
from visual_grpo.errors import UserError
from visual_grpo.hardware.turns import present
from visual_grpo.policies.family import Module
from visual_grpo.policies.lora import Adapter


class AdapterPolicy:
    """Parameters and state of ``types.Policy``."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter

    def trainable_parameters(self) -> list[nn.Parameter]:
        return self.adapter.parameters()

    def adapter_state_dict(self) -> dict[str, Tensor]:
        return self.adapter.state()

    def load_adapter_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.adapter.load_state(state)

    def save_adapter(self, folder: Path | str) -> None:
        """In the format of the library that the module comes from; the README says how to load it."""
        self.adapter.save(folder)


class AdapterSet:
    """Attaches, loads and saves; empty at first."""

    def __init__(self, modules: Mapping[str, Module], networks: Mapping[str, Any]) -> None:
        """``networks``: the model of transformers or diffusers that each module's LoRA is put on."""
        self._modules, self.networks = modules, networks
        self._adapters: dict[str, Adapter] = {}

    def attach(self, params: Mapping[str, LoraParams], seed: int) -> None:
        """A fresh adapter for each module named; changes nothing until it is trained. ``seed`` decides its initial
        values."""
        for name, own in params.items():
            module = self._modules[name]
            with present(self.networks[name]):  # The LoRA is put where the weights are, and stays there.
                self._adapters[name] = module.adapter.attach(self.networks[name], own, module.targets, seed)

    def load(self, folder: Path, names: Sequence[str]) -> None:
        """Saved adapters, one folder a module, for sampling only."""
        for name in names:
            with present(self.networks[name]):
                self._adapters[name] = self._modules[name].adapter.load(self.networks[name], folder / name)

    def start_from(self, folder: Path) -> None:
        """Gives the attached adapters the weights of saved ones of the same LoRA, to be trained on."""
        for name, adapter in self._adapters.items():
            adapter.load_state(self._modules[name].adapter.saved(folder / name))

    def save(self, folder: Path) -> None:
        """One folder a module, each in its library's format."""
        for name, adapter in self._adapters.items():
            adapter.save(folder / name)

    def state(self) -> dict[str, Tensor]:
        """Every adapter's tensors, as ``module/name``; copies, which training does not change."""
        return {
            f"{m}/{name}": value for m, adapter in self._adapters.items() for name, value in adapter.state().items()
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Puts tensors of ``state`` back."""
        for name, adapter in self._adapters.items():
            start = f"{name}/"
            adapter.load_state({k.removeprefix(start): v for k, v in state.items() if k.startswith(start)})

    def __getitem__(self, name: str) -> Adapter:
        if name not in self._adapters:
            raise UserError(f"the module {name!r} has no adapter yet: call adapters.attach or adapters.load first")
        return self._adapters[name]

    def __contains__(self, name: str) -> bool:
        return name in self._adapters
