"""The visual vocabulary of drawn words: an image token says which tile of the sign a patch belongs to.

The tiles' colours have equal sums and norms, so that the nearest code is that of the patch's tile, however much of the
patch is covered by ink. So tokens encode where text is, but not which text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visual_grpo.starter.glm_image.codebook import CELLS, CODEBOOK_SIZE, FEATURES
from visual_grpo.starter.words.world import TILES

_CYCLE = 5
"""Number of cells after which the pattern of an unused code repeats; 3 ** _CYCLE exceeds the number of codes."""


def tile_codebook() -> Tensor:
    """float32 [CODEBOOK_SIZE, 48] in 0..1: a code for each tile, then unused codes that are far from any picture."""
    cells = torch.arange(CELLS * CELLS)
    primaries = torch.eye(3)
    unused = [primaries[code // 3 ** (cells % _CYCLE) % 3].flatten() for code in range(CODEBOOK_SIZE)]
    codes = torch.stack(unused)
    codes[: len(TILES)] = torch.tensor(TILES, dtype=torch.float32).repeat(1, CELLS * CELLS) / 255
    assert codes.shape == (CODEBOOK_SIZE, FEATURES)
    return codes
