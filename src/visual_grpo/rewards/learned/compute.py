"""How a reward's model computes: device, precision, and batches of one size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.hardware.device import resolve_device

DTYPES = ("float32", "bfloat16", "float16")
_ON_ACCELERATOR = 16
"""Images of a batch, where none is set."""


class Compute:
    """The options ``device``, ``dtype`` and ``batch_size`` of the reward named ``reward``.

    Raises UserError for values that no machine can have; whether this machine has the device is told by `device`.
    """

    def __init__(self, reward: str, device: str, dtype: str, batch_size: int | None) -> None:
        if dtype not in DTYPES:
            raise UserError(f"{reward}: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if batch_size is not None and batch_size < 1:
            raise UserError(f"{reward}: batch_size must be at least 1 or null, got {batch_size}")
        self.reward = reward
        self.dtype: torch.dtype = getattr(torch, dtype)
        self._device = device
        self._batch_size = batch_size

    @property
    def device(self) -> torch.device:
        """Raises UserError if this machine does not have it."""
        return resolve_device(self._device, f"the option device of the reward {self.reward}")

    @property
    def batch_size(self) -> int:
        return self._batch_size or (1 if self.device.type == "cpu" else _ON_ACCELERATOR)

    def rows(self, model: Callable[[Tensor], Tensor], inputs: Sequence[Tensor]) -> Tensor:
        """``model`` of each of B inputs of one shape, [B, ...] float32 on the CPU, without gradient.

        Every batch has ``batch_size`` rows, the last one filled up with copies: a matrix product may round differently
        for another number of rows, and then a score would depend on the samples beside it.
        """
        size = self.batch_size
        found = []
        for start in range(0, len(inputs), size):
            own = list(inputs[start : start + size])
            batch = torch.stack(own + own[-1:] * (size - len(own))).to(self.device, self.dtype)
            with torch.no_grad():
                found.append(model(batch)[: len(own)].float().cpu())
        return torch.cat(found) if found else torch.zeros(0)
