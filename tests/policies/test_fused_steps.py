"""A token by few kernels is the token by the model's own layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.policies.token_policies import any_policy, prompts_of
from tests.pretend.conftest import vl_folder
from visual_grpo.hardware import shards
from visual_grpo.policies import fused_layers, lora
from visual_grpo.policies.fused_steps import FusedSteps, fits
from visual_grpo.policies.prompt_cache import Prefix, prefill
from visual_grpo.policies.token_steps import GrowingSteps, TokenSteps, token_steps

__all__ = ["any_policy", "vl_folder"]

BEFORE, TOKENS, OF_ROWS = 9, 7, [1, 0, 0, 1, 1]


def prefix_of(policy: Any, padded: int) -> Prefix:
    return prefill(policy.model.network, prompts_of(policy, BEFORE, TOKENS, padded), torch.tensor(OF_ROWS))


def hidden_states(steps: TokenSteps, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    rows = [steps.next(torch.randn(len(OF_ROWS), 1, width, generator=generator)) for _ in range(TOKENS - 1)]
    return torch.cat(rows, 1)


@pytest.mark.parametrize("padded", [0, 4])
@torch.no_grad()
def test_the_hidden_states_are_those_of_the_layers(any_policy: Any, padded: int) -> None:
    policy, network = any_policy, any_policy.model.network
    width = network.config.get_text_config().hidden_size
    with lora.merged(network):
        fused = token_steps(network, prefix_of(policy, padded), TOKENS, "growing")
        assert isinstance(fused, FusedSteps)
        found = hidden_states(fused, width)
        own = hidden_states(GrowingSteps(network, prefix_of(policy, padded), TOKENS), width)
    torch.testing.assert_close(found, own, rtol=0, atol=1e-5)
    with policy.adapter.disabled(), lora.merged(network):
        base = hidden_states(token_steps(network, prefix_of(policy, padded), TOKENS, "growing"), width)
        own = hidden_states(GrowingSteps(network, prefix_of(policy, padded), TOKENS), width)
    torch.testing.assert_close(base, own, rtol=0, atol=1e-5)
    assert (base - found).abs().max() > 1e-2


@torch.no_grad()
def test_other_layers_are_left_to_the_model(any_policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    network, prefix = any_policy.model.network, prefix_of(any_policy, 0)
    assert not fits(network, prefix), "an adapter that is neither merged nor off is more than a weight"
    with lora.merged(network):
        assert fits(network, prefix)
        for where, name, value in (
            (fused_layers, "_MOST_WEIGHTS", 10),
            (fused_layers, "_LAYERS", ("Other",)),
            (shards, "active", lambda: True),
            (network.config.get_text_config(), "hidden_act", "gelu"),
            (network.config.get_text_config(), "layer_types", ["full_attention", "sliding_attention"]),
        ):
            with monkeypatch.context() as changed:
                changed.setattr(where, name, value, raising=False)
                assert not fits(network, prefix), name
        assert not fits(network, replace(prefix, hidden=prefix.hidden.bfloat16()))
        network.model.language_model.layers[0].self_attn.o_proj = Other(2, 2)
        assert not fits(network, prefix), "a layer of another kind"


class Other(nn.Linear):
    """Does more than a product."""
