"""Tokens and start noise of one seed are independent."""

from __future__ import annotations

import torch

from tests.policies.toy_flow import ToyFlow
from visual_grpo.config import PolicyConfig
from visual_grpo.policies.denoising import Denoiser
from visual_grpo.policies.tokens import row_uniforms

ROWS = 2_000
LARGEST = 0.1
"""4.5 standard errors of a correlation of 2,000 pairs. With one stream for both it is .157: the normal generator takes
the size of some numbers from the very bits that some uniforms are made of."""


def test_tokens_and_start_noise_of_a_seed_are_independent() -> None:
    seeds = torch.randint(2**62, (ROWS,), generator=torch.Generator().manual_seed(0)).tolist()
    uniforms = row_uniforms(seeds, 16).float()
    denoiser = Denoiser(ToyFlow(), PolicyConfig())
    sizes = denoiser.start_noise(seeds).flatten(1)[:, :64].square()
    assert torch.corrcoef(torch.cat([uniforms, sizes], 1).t())[:16, 16:].abs().max() < LARGEST
