"""An average of the trained weights: DiffusionNFT samples with it, advantage weighted matching is pulled to it.

The schedule is that of both authors' code (NVlabs/DiffusionNFT, scripts/train_nft_sd3.py, decay_type 1;
scxue/advantage_weighted_matching, scripts/train_sd3_awm.py, kl_ema_decay_type linear).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

RISE = 0.001
"""Increase of the decay with each update, until it is the largest."""


class WeightAverage:
    """Weights that follow the trained ones: ``average += (1 - d) (trained - average)`` after each rollout's updates.

    d is ``min(RISE * n, decay)`` after n updates, so that the average is nearly the trained weights at first.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        self.parameters, self.decay = parameters, decay
        self.weights = [parameter.detach().clone() for parameter in parameters]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Gives the policy the averaged weights inside the block, and its trained weights back after it."""
        trained = [parameter.detach().clone() for parameter in self.parameters]
        self._set(self.weights)
        try:
            yield
        finally:
            self._set(trained)

    @torch.no_grad()
    def follow(self, updates: int) -> None:
        """``updates``: of the training so far."""
        for average, parameter in zip(self.weights, self.parameters, strict=True):
            average.lerp_(parameter, 1 - min(RISE * updates, self.decay))

    def state(self) -> dict[str, Tensor]:
        """``NUMBER`` -> weights of a parameter."""
        return {str(number): weights.clone() for number, weights in enumerate(self.weights)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.weights = [state[str(number)].to(average) for number, average in enumerate(self.weights)]

    @torch.no_grad()
    def _set(self, weights: Sequence[Tensor]) -> None:
        for parameter, value in zip(self.parameters, weights, strict=True):
            parameter.copy_(value)
