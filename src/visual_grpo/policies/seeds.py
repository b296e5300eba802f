"""Seeds of rollouts: one per sample, and separate random streams for everything that one seed decides."""

from __future__ import annotations

import torch

SEED_RANGE = 2**62

START_NOISE = 0x5851F42D
STEP_NOISE = 0x2545F491
"""XORed into a seed, so that tokens (the seed itself), start noise and the noise of stochastic denoising steps come from
three streams. Below 2^32, since torch's CPU generator reads no higher bit of its seed.
"""


def draw_seeds(count: int, generator: torch.Generator) -> list[int]:
    """``count`` seeds from ``generator``, which thereby decides everything random in a rollout."""
    seeds: list[int] = torch.randint(SEED_RANGE, (count,), generator=generator).tolist()
    return seeds
