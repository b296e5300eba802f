"""What another process answers, asked without the process."""

from __future__ import annotations

import torch

from tests.sharing.build import toys
from visual_grpo.sharing.worker import Worker


def test_a_gradient_that_was_broken_off_leaves_nothing() -> None:
    worker = Worker(toys(kind="SeededTokens", device="cpu"))
    [module] = worker.trained.policies
    [parameter] = worker.trained.policies[module].trainable_parameters()
    worker.begin(module)
    parameter.sum().backward()
    worker.begin(module)
    for _ in range(2):
        parameter.sum().backward()
    [total] = worker.gradients(module)
    assert total is not None
    assert torch.equal(total, torch.full(parameter.shape, 2.0, dtype=torch.float64))
