"""A saved model without its weights: its configuration files say what it is, the rest loads as ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from visual_grpo.config import ModelConfig
from visual_grpo.plan.released.weightless import frozen
from visual_grpo.plan.replaced import replaced
from visual_grpo.policies.family import Family


def load_without_weights(family: Family, path: str, config: ModelConfig) -> Any:
    """What ``family.load`` gives; the files of weights need not be there."""
    dtype = getattr(torch, config.dtype)
    with _weights_left_out(dtype):
        changes = {"device": "meta", "offload": "none", "base_weights": "full"}  # Both come later, for any model.
        return family.load(path, config.model_copy(update=changes))


@contextmanager
def _weights_left_out(dtype: torch.dtype) -> Iterator[None]:
    """While it lasts, the libraries' ``from_pretrained`` of a network reads its configuration only."""
    from diffusers import ModelMixin
    from transformers import PreTrainedModel

    def of_diffusers(_: Callable[..., Any]) -> Any:
        return classmethod(lambda cls, path, **given: frozen(lambda: _of_diffusers(cls, path, given), dtype))

    def of_transformers(_: Callable[..., Any]) -> Any:
        return classmethod(lambda cls, path, **given: _of_transformers(cls, _folder(path, given), dtype))

    with (
        replaced(ModelMixin, "from_pretrained", of_diffusers),
        replaced(PreTrainedModel, "from_pretrained", of_transformers),
    ):
        yield


def _of_diffusers(cls: Any, path: Any, given: dict[str, Any]) -> Any:
    return cls.from_config(cls.load_config(_folder(path, given)))


def _of_transformers(cls: Any, folder: Path, dtype: torch.dtype) -> Any:
    from transformers import GenerationConfig

    model = frozen(lambda: cls(cls.config_class.from_pretrained(folder)), dtype)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _folder(path: Any, given: dict[str, Any]) -> Path:
    return Path(path, given.get("subfolder") or "")
