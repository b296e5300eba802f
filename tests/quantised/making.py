"""Small models of the real classes on a base of few bits, and their trainings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.pretend.test_policies import CASES
from tests.pretend.trained import config_of, score
from tests.training.few_steps import resolved
from visual_grpo.config import Parameters, merged
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.training import components

FAMILIES = ("ar", "dit", "sd3", "qwen_image", "qwen2_5_vl")


def few_bits(folder: Path, case: str, base_weights: str, device: str = "cpu", **changes: Any) -> Parameters:
    """One of `CASES` with a base of ``base_weights``, and ``changes`` section by section.

    Trainings take two steps: the second samples with an adapter that is not zero.
    """
    base = {"model": {"base_weights": base_weights}, "grpo": {"steps": 2}}
    own = merged(merged(CASES[case][1], base), changes)
    return config_of(folder, device, **own)


def loaded(config: Parameters, folder: Path) -> Any:
    """The model, without adapters."""
    return components.build_model(resolved(config, folder))


def trainer_of(config: Parameters, folder: Path, model: Any = None) -> Any:
    model = loaded(config, folder) if model is None else model
    spec = resolved(config, folder)
    return components.build_trainer(spec, model, RewardSet({"brightness": (score, 1.0)}))


def base_tensors(networks: Sequence[nn.Module]) -> list[Tensor]:
    """Copies of all that is frozen."""
    return [
        tensor.detach().clone()
        for network in networks
        for tensor in (*network.parameters(), *network.buffers())
        if not tensor.requires_grad
    ]


def bytes_of(networks: Sequence[nn.Module]) -> int:
    """Of memory that is set aside for parameters and buffers."""
    storages = [t.untyped_storage() for network in networks for t in (*network.parameters(), *network.buffers())]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())
