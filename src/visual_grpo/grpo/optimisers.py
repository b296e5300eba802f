"""Optimisers of adapters with their state for a checkpoint, and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from visual_grpo.common.device import bitsandbytes
from visual_grpo.common.errors import UserError
from visual_grpo.config import GRPOConfig

Kind = Literal["constant", "linear", "cosine"]
SETTING = "grpo.optimizer"
_TABLES = {"qmap1": "dynamic", "qmap2": "udynamic"}
"""Entries of bitsandbytes' state that are the same for all parameters, by the names of the optimiser's own tables: what
the codes of each moment mean."""


def learning_rate_factor(update: int, total: int, warmup: int, kind: Kind) -> float:
    """Factor on the peak learning rate for ``update`` (0-based) of ``total``.

    Linear from 1/warmup to 1 over ``warmup`` updates, then constant, or falling to 0 at ``total``.
    """
    if update < warmup:
        return (update + 1) / warmup
    progress = min((update - warmup) / max(total - warmup, 1), 1.0)
    if kind == "linear":
        return 1 - progress
    if kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1.0


def build_optimiser(parameters: Sequence[nn.Parameter], config: GRPOConfig) -> torch.optim.Optimizer:
    """AdamW. Raises UserError where its library is missing or does not work on the parameters' device."""
    kind: Any = torch.optim.AdamW
    if config.optimizer == "adamw_8bit":
        kind = bitsandbytes(SETTING, config.optimizer, parameters[0].device).optim.AdamW8bit
    made: torch.optim.Optimizer = kind(
        parameters, lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay
    )
    return made


def optimiser_state(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """``NUMBER/NAME`` -> tensor, for each parameter in its order that was updated; numbers as tensors of one."""
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    return {
        f"{index}/{name}": torch.as_tensor(value)
        for index, parameter in enumerate(parameters)
        for name, value in optimiser.state.get(parameter, {}).items()
        if not (_is_8bit(optimiser) and name in _TABLES)
    }


def load_optimiser_state(optimiser: Any, state: Mapping[str, Tensor]) -> None:
    """Restores what `optimiser_state` gave. Raises UserError for what the other kind of optimiser gave."""
    entries: dict[int, dict[str, Any]] = {}
    for key, value in state.items():
        index, name = key.split("/")
        entries.setdefault(int(index), {})[name] = value
    names = {name for own in entries.values() for name in own}
    if names and ("state1" in names) != _is_8bit(optimiser):
        raise UserError(f"The checkpoint was written with another {SETTING}. Set it as it was, or start at step 1.")
    for own in entries.values() if _is_8bit(optimiser) else ():
        own["step"] = int(own["step"])
        if own["state1"].dtype == torch.uint8:
            own |= {name: optimiser.name2qmap[table] for name, table in _TABLES.items()}
    optimiser.load_state_dict({"state": entries, "param_groups": optimiser.state_dict()["param_groups"]})


def _is_8bit(optimiser: torch.optim.Optimizer) -> bool:
    return hasattr(optimiser, "name2qmap")
