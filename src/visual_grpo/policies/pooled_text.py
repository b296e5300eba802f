"""Encoded prompts of one length with a pooled embedding each, as Stable Diffusion 3 and Flux read them.

Shapes: N prompts, b rows, L tokens of width D, P the pooled width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class PooledText(NamedTuple):
    embeds: Tensor
    """[N, L, D]."""
    pooled: Tensor
    """[N, P]."""

    @classmethod
    def of(cls, prompts: Sequence[PooledText]) -> PooledText:
        """Several as one."""
        return cls(torch.cat([prompt.embeds for prompt in prompts]), torch.cat([prompt.pooled for prompt in prompts]))

    def rows(self, entries: Tensor) -> PooledText:
        """Of ``entries`` ([b] int64)."""
        return PooledText(self.embeds[entries], self.pooled[entries])
