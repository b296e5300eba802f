"""Seeds of rollouts: one per sample, and separate random streams for everything that one seed decides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SEED_RANGE = 2**62

START_NOISE = 0x5851F42D
STEP_NOISE = 0x2545F491
"""XORed into a seed, so that tokens (the seed itself), start noise and the noise of stochastic denoising steps are
independent. Below 2^32, since torch's CPU generator reads no higher bit of its seed.
"""


_share: tuple[int, int, int] | None = None


def draw_seeds(count: int, generator: torch.Generator) -> list[int]:
    """``count`` seeds from ``generator``, which thereby decides everything random in a rollout."""
    start, own, total = (0, count, count) if _share is None else (part * count // _share[1] for part in _share)
    seeds: list[int] = torch.randint(SEED_RANGE, (total,), generator=generator).tolist()
    return seeds[start : start + own]


@contextmanager
def share_of_seeds(start: int, own: int, total: int) -> Iterator[None]:
    """Inside the block a rollout of ``own`` prompts gets the seeds that the prompts from ``start`` on have in a rollout
    of ``total`` prompts, and leaves the generator where that one does."""
    global _share
    before, _share = _share, (start, own, total)
    try:
        yield
    finally:
        _share = before
