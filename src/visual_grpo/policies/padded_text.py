"""Encoded prompts of different lengths as one tensor.

Shapes: N prompts, b rows, L tokens of the longest prompt, D their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True, kw_only=True)
class PaddedText:
    """Embeddings of N prompts and which of them are padding."""

    embeds: Tensor
    """[N, L, D]."""
    mask: Tensor | None
    """[N, L] bool, True = a token of the prompt; None where nothing is padded."""

    @classmethod
    def of(cls, prompts: Sequence[Tensor]) -> PaddedText:
        """``prompts``: N of [length, D]."""
        embeds = pad_sequence(list(prompts), batch_first=True)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=embeds.device)
        mask = torch.arange(embeds.shape[1], device=embeds.device) < lengths[:, None]
        return cls(embeds=embeds, mask=None if mask.all() else mask)

    def rows(self, entries: Tensor) -> PaddedText:
        """Of ``entries`` ([b] int64), with all the padding: a row's velocity must not depend on its neighbours."""
        return PaddedText(embeds=self.embeds[entries], mask=None if self.mask is None else self.mask[entries])
