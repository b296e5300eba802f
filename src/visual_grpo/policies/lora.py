"""LoRA adapters through peft: attach, switch off for the reference, merge for sampling, save, load."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from visual_grpo.config import LoraParams
from visual_grpo.errors import UserError

if TYPE_CHECKING:
    from peft import PeftModel


def attach_lora(model: nn.Module, params: LoraParams, default_targets: str, seed: int) -> PeftModel:
    """Freezes ``model`` and adds a LoRA of zero effect (B = 0; arXiv 2106.09685), without dropout.

    A's initial values come from ``seed``; torch's own generator is left as it was.
    """
    from peft import LoraConfig, get_peft_model

    model.requires_grad_(False)
    targets = params.target_modules if params.target_modules is not None else default_targets
    config = LoraConfig(r=params.rank, lora_alpha=params.alpha, lora_dropout=0.0, target_modules=targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, config)


def load_lora(model: nn.Module, folder: Path) -> PeftModel:
    """A saved adapter on a plain model, for sampling only."""
    from peft import PeftModel
    from safetensors import SafetensorError

    if not (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder} holds no adapter (no adapter_config.json); run `kedro run --pipeline=train`.")
    try:
        return PeftModel.from_pretrained(model, str(folder))
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # Damaged, missing or of another model.
        raise UserError(
            f"The adapter in {folder} cannot be loaded: {error}\nMake it again: kedro run --pipeline=train"
        ) from error


def adapter_state(model: PeftModel) -> dict[str, Tensor]:
    """The adapter's tensors by the names that peft saves."""
    from peft import get_peft_model_state_dict

    return {name: value.detach().clone() for name, value in get_peft_model_state_dict(model).items()}


def load_adapter_state(model: PeftModel, state: Mapping[str, Tensor]) -> None:
    """Puts tensors of ``adapter_state`` back; every one must fit."""
    from peft import set_peft_model_state_dict

    expected = set(adapter_state(model))
    if expected != set(state):
        odd = sorted(expected.symmetric_difference(state))[:3]
        raise UserError(f"The saved adapter does not fit this model: {odd} differ. Were policy.lora or model changed?")
    set_peft_model_state_dict(model, dict(state))


@contextlib.contextmanager
def merged(model: nn.Module) -> Iterator[None]:
    """The adapter folded into the weights while sampling: one matrix product instead of three.

    Afterwards the weights are put back from copies, since adding and subtracting would leave rounding
    behind. In half precision folding rounds the update away, so there it is left unfolded.
    """
    from peft.tuners.lora import LoraLayer

    layers = [m for m in model.modules() if isinstance(m, LoraLayer)]
    if not all(layer.get_base_layer().weight.dtype == torch.float32 for layer in layers):
        yield
        return
    originals = [layer.get_base_layer().weight.detach().clone() for layer in layers]
    try:
        for layer in layers:
            layer.merge()
        yield
    finally:
        for layer, weight in zip(layers, originals, strict=True):
            layer.merged_adapters.clear()
            layer.get_base_layer().weight.data.copy_(weight)
