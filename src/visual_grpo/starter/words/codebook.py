"""The visual vocabulary of the words world: an image token says which tile of the sign a patch belongs to.

The tiles' colours have equal sums and norms, so that whatever share of a patch is inked, its own tile's code stays
the nearest. Where something is written the tokens say; what is written they do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visual_grpo.starter.glm_image.codebook import CELLS, CODEBOOK_SIZE, FEATURES
from visual_grpo.starter.words.world import TILES

_CYCLE = 5
"""Cells after which the pattern of an unused code repeats; 3 ** _CYCLE patterns are more than there are codes."""


def tile_codebook() -> Tensor:
    """float32 [CODEBOOK_SIZE, 48] in 0..1: a code for each tile, then codes that no picture comes near."""
    cells = torch.arange(CELLS * CELLS)
    primaries = torch.eye(3)
    unused = [primaries[code // 3 ** (cells % _CYCLE) % 3].flatten() for code in range(CODEBOOK_SIZE)]
    codes = torch.stack(unused)
    codes[: len(TILES)] = torch.tensor(TILES, dtype=torch.float32).repeat(1, CELLS * CELLS) / 255
    assert codes.shape == (CODEBOOK_SIZE, FEATURES)
    return codes
