"""Which prompts a step sees: a function of the seed and of how many were drawn before."""

from __future__ import annotations

import torch


class PromptOrder:
    """Endless passes over ``size`` prompts, each pass in an order of its own.

    ``position`` (prompts drawn so far) is the whole state, so a checkpoint needs one number.
    """

    def __init__(self, size: int, seed: int, position: int = 0) -> None:
        if size < 1:
            raise ValueError("there are no prompts to draw from")
        self.size, self.seed, self.position = size, seed, position
        self._pass: tuple[int, list[int]] | None = None

    def draw(self, count: int) -> list[int]:
        """Indices of the next ``count`` prompts."""
        drawn = []
        for position in range(self.position, self.position + count):
            epoch, offset = divmod(position, self.size)
            drawn.append(self._order(epoch)[offset])
        self.position += count
        return drawn

    def _order(self, epoch: int) -> list[int]:
        if self._pass is None or self._pass[0] != epoch:
            generator = torch.Generator().manual_seed((self.seed << 24) + epoch)
            self._pass = epoch, torch.randperm(self.size, generator=generator).tolist()
        return self._pass[1]
