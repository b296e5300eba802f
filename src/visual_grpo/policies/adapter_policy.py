"""The part of a policy that its LoRA adapter does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

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
