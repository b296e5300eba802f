"""A replay by few operations has the values and gradients of the model's own layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.policies.token_policies import any_policy, prompts_of
from tests.pretend.conftest import vl_folder
from visual_grpo.policies import fused_layers, lora
from visual_grpo.policies.fused_layers import fits, hidden_fused, prefill_fused
from visual_grpo.policies.prompt_cache import hidden_shared, hidden_whole, prefill

__all__ = ["any_policy", "vl_folder"]

BEFORE, TOKENS, OF_ROWS = 9, 40, torch.tensor([1, 0, 0, 1, 1])
"""More tokens than a block of queries has."""


def hidden_and_gradients(of: Any, policy: Any, padded: int, count: int = TOKENS) -> list[Tensor]:
    """[b, T, H], and the gradients of all LoRA weights for one gradient of it."""
    network, generator = policy.model.network, torch.Generator().manual_seed(2)
    tokens = torch.randint(20, (len(OF_ROWS), count), generator=generator)
    with lora.merged_with_gradient(network):
        hidden = of(network, prompts_of(policy, BEFORE, TOKENS, padded), OF_ROWS, tokens)
    outer = torch.randn(hidden.shape, generator=generator)
    gradients = torch.autograd.grad(hidden, policy.adapter.parameters(), outer, materialize_grads=True)
    return [hidden.detach(), *gradients]


@pytest.mark.parametrize(("padded", "count"), [(0, TOKENS), (4, TOKENS), (4, 2), (4, 1)])
def test_values_and_gradients_are_those_of_the_layers(any_policy: Any, padded: int, count: int) -> None:
    found = hidden_and_gradients(hidden_fused, any_policy, padded, count)
    assert len(found) > 10
    assert all(gradient.any() for gradient in found)
    for other in (hidden_shared, hidden_whole):
        expected = hidden_and_gradients(other, any_policy, padded, count)
        for own, models in zip(found, expected, strict=True):
            assert float((own - models).abs().max() / models.abs().max()) < 1e-5


@pytest.mark.parametrize("padded", [0, 4])
@torch.no_grad()
def test_a_prefill_is_that_of_the_layers(any_policy: Any, padded: int) -> None:
    network, prompts = any_policy.model.network, prompts_of(any_policy, BEFORE, TOKENS, padded)
    found, expected = prefill_fused(network, prompts, OF_ROWS), prefill(network, prompts, OF_ROWS)
    torch.testing.assert_close(found.hidden, expected.hidden, rtol=0, atol=1e-5)
    assert torch.equal(found.mask, expected.mask)
    assert torch.equal(found.token_positions, expected.token_positions)
    seen = prompts.mask[OF_ROWS].bool()[:, None, :, None]
    for own, models in zip(found.cache.layers, expected.cache.layers, strict=True):
        torch.testing.assert_close(own.keys * seen, models.keys * seen, rtol=0, atol=1e-5)
        torch.testing.assert_close(own.values * seen, models.values * seen, rtol=0, atol=1e-5)


def test_the_adapter_may_be_off(any_policy: Any) -> None:
    """As for the reference's log-probs."""
    network, prompts = any_policy.model.network, prompts_of(any_policy, BEFORE, TOKENS, 4)
    tokens = torch.zeros(len(OF_ROWS), TOKENS, dtype=torch.int64)
    with torch.no_grad():
        on = hidden_fused(network, prompts, OF_ROWS, tokens)
        with any_policy.adapter.disabled():
            off = hidden_fused(network, prompts, OF_ROWS, tokens)
            models = hidden_shared(network, prompts, OF_ROWS, tokens)
            with any_policy.adapter.disabled():
                pass
            assert torch.equal(hidden_fused(network, prompts, OF_ROWS, tokens), off), "one inside the other"
        again = hidden_fused(network, prompts, OF_ROWS, tokens)
    assert torch.equal(on, again), "afterwards it is on"
    assert any_policy.adapter.parameters(), "they are trained again"
    torch.testing.assert_close(off, models, rtol=0, atol=1e-5)
    assert (on - off).abs().max() > 1e-2


def test_long_rows_are_left_to_the_model(any_policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    network, prompts = any_policy.model.network, prompts_of(any_policy, BEFORE, TOKENS, 0)
    heads = network.config.get_text_config().num_attention_heads
    assert fits(network, prompts, 5, TOKENS)
    for rows, count, scores in ((5, TOKENS, 5 * TOKENS * (BEFORE + TOKENS)), (5, 0, 2 * BEFORE**2)):
        monkeypatch.setattr(fused_layers, "_MOST_SCORES", heads * scores)
        assert fits(network, prompts, rows, count)
        monkeypatch.setattr(fused_layers, "_MOST_SCORES", heads * scores - 1)
        assert not fits(network, prompts, rows, count)
