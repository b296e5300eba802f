"""Prompts that rows share give the values and gradients of whole rows, with activations kept or computed again."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.token_policies import any_policy, hidden_whole, prompts_of
from tests.pretend.conftest import vl_folder
from visual_grpo.models.tokens.prompt_cache import hidden_shared

__all__ = ["any_policy", "vl_folder"]

BEFORE, TOKENS, OF_ROWS = 9, 12, torch.tensor([1, 0, 0, 1, 1])


def hidden_and_gradients(of: Any, policy: Any, padded: int, count: int, attention: str) -> list[Tensor]:
    """[b, T, H], and the gradients of all LoRA weights for one gradient of it."""
    network, generator = policy.model.network, torch.Generator().manual_seed(2)
    network.set_attn_implementation(attention)
    tokens = torch.randint(20, (len(OF_ROWS), count), generator=generator)
    hidden = of(network, prompts_of(policy, BEFORE, TOKENS, padded), OF_ROWS, tokens)
    outer = torch.randn(hidden.shape, generator=generator)
    gradients = torch.autograd.grad(hidden, policy.adapter.parameters(), outer, materialize_grads=True)
    return [hidden.detach(), *gradients]


@pytest.mark.parametrize(
    ("padded", "count", "attention"), [(0, TOKENS, "sdpa"), (4, TOKENS, "eager"), (4, 2, "sdpa"), (4, 1, "eager")]
)
def test_values_and_gradients_are_those_of_whole_rows(any_policy: Any, padded: int, count: int, attention: str) -> None:
    expected = hidden_and_gradients(hidden_whole, any_policy, padded, count, attention)
    assert len(expected) > 10
    assert all(gradient.any() for gradient in expected)
    for checkpointing in (False, True):
        shared = partial(hidden_shared, checkpointing=checkpointing)
        found = hidden_and_gradients(shared, any_policy, padded, count, attention)
        for own, whole in zip(found, expected, strict=True):
            assert float((own - whole).abs().max() / whole.abs().max()) < 1e-5


def test_checkpointing_keeps_less_for_the_backward_pass(any_policy: Any) -> None:
    network, tokens = any_policy.model.network, torch.zeros(len(OF_ROWS), TOKENS, dtype=torch.int64)

    def kept(checkpointing: bool) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            sizes[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden_shared(
                network, prompts_of(any_policy, BEFORE, TOKENS, 4), OF_ROWS, tokens, checkpointing=checkpointing
            )
        return sum(sizes.values())

    assert kept(checkpointing=True) < 0.3 * kept(checkpointing=False)
