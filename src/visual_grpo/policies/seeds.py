"""Seeds of rollouts: one per sample, and separate random streams for everything that one seed decides."""

from __future__ import annotations

import torch

from visual_grpo.distributed.group import current_share

SEED_RANGE = 2**62

START_NOISE = 0x5851F42D
STEP_NOISE = 0x2545F491
"""XORed into a seed, so that tokens (the seed itself), start noise and the noise of stochastic denoising steps are
independent. Below 2^32, since torch's CPU generator reads no higher bit of its seed.
"""


def draw_seeds(count: int, generator: torch.Generator) -> list[int]:
    """Draws ``count`` seeds from ``generator``, which thereby decides everything random in a rollout.

    Of a rollout that several ranks share, all seeds are drawn, and this rank's are returned.
    """
    share = current_share()
    start, own, total = (0, count, count) if share is None else (part * count // share[1] for part in share)
    seeds: list[int] = torch.randint(SEED_RANGE, (total,), generator=generator).tolist()
    return seeds[start : start + own]
