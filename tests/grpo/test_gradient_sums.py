"""Gradients of parts are added up so that their order and number leave no trace."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from visual_grpo.grpo.optimizer import GradientSums

PARTS = [1.0, 2.0**-30, -1.0, 2.0**-31]
"""In float32, added one after the other, the second one is lost."""
TOTAL = 2.0**-30 + 2.0**-31


def test_what_nearly_cancels_is_not_lost() -> None:
    parameter, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    with GradientSums([parameter, unused]):
        for part in PARTS:
            (parameter * part).sum().backward()
            assert parameter.grad is None
    assert unused.grad is None
    assert parameter.grad is not None
    assert parameter.grad.dtype == torch.float32
    assert torch.equal(parameter.grad, torch.full((3,), TOTAL))


def test_other_ranks_add_theirs_before_it_is_rounded() -> None:
    parameter, elsewhere, unused = (nn.Parameter(torch.ones(3)) for _ in range(3))
    flat: list[Tensor] = []

    with GradientSums([elsewhere, unused]) as there:
        for part in PARTS[1:]:
            (elsewhere * part).sum().backward()
        there.reduce(flat.append)
    with GradientSums([parameter, unused]) as here:
        (parameter * PARTS[0]).sum().backward()
        here.reduce(lambda values: values.add_(flat[0]))
    assert flat[0].dtype == torch.float64
    assert unused.grad is None, "an optimiser moves a parameter whose gradient is 0"
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, torch.full((3,), TOTAL))
