"""A token by few kernels is the token by the model's own layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import SIZE, stir
from tests.pretend.conftest import vl_folder
from visual_grpo.components import load_policy
from visual_grpo.hardware import shards
from visual_grpo.policies import fused_steps, lora
from visual_grpo.policies.fused_steps import FusedSteps, fits
from visual_grpo.policies.prompt_cache import Prefix, Prompts, prefill
from visual_grpo.policies.token_steps import GrowingSteps, TokenSteps, token_steps

__all__ = ["vl_folder"]

ROWS, BEFORE, TOKENS = 5, 9, 7


@pytest.fixture(params=["pipeline_folder", "vl_folder"])
def policy(request: pytest.FixtureRequest) -> Any:
    """GLM-Image's, of which a part of each head is turned, and Qwen2.5-VL's; both with biases."""
    policy = load_policy(str(request.getfixturevalue(request.param)), size=SIZE, device="cpu")
    stir(policy)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in policy.model.network.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return policy


def prefix_of(policy: Any, padded: int) -> Prefix:
    """Two prompts, one of them shorter by ``padded``, of rows in any order."""
    network = policy.model.network
    config = network.config.get_text_config()
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(2, BEFORE, dtype=torch.int64)
    mask[1, :padded] = 0
    positions = torch.arange(BEFORE + TOKENS).expand(3, 2, -1).clone()
    positions[1] += 2  # A picture's rows and columns run apart from its text.
    positions[2, 1] *= 3
    prompts = Prompts(
        embeds=torch.randn(2, BEFORE, config.hidden_size, generator=generator),
        mask=mask,
        positions=positions[..., :BEFORE],
        token_positions=positions[..., BEFORE:],
    )
    return prefill(network, prompts, torch.tensor([1, 0, 0, 1, 1])[:ROWS])


def hidden_states(steps: TokenSteps, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    rows = [steps.next(torch.randn(ROWS, 1, width, generator=generator)) for _ in range(TOKENS - 1)]
    return torch.cat(rows, 1)


@pytest.mark.parametrize("padded", [0, 4])
@torch.no_grad()
def test_the_hidden_states_are_those_of_the_layers(policy: Any, padded: int) -> None:
    network = policy.model.network
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
def test_other_layers_are_left_to_the_model(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    network = policy.model.network
    prefix = prefix_of(policy, 0)
    assert not fits(network, prefix), "an adapter that is neither merged nor off is more than a weight"
    with lora.merged(network):
        assert fits(network, prefix)
        for where, name, value in (
            (fused_steps, "_MOST_WEIGHTS", 10),
            (fused_steps, "_LAYERS", ("Other",)),
            (shards, "active", lambda: True),
            (prefix.cache.layers[0], "is_sliding", True),
        ):
            with monkeypatch.context() as changed:
                changed.setattr(where, name, value)
                assert not fits(network, prefix), name
        assert not fits(network, replace(prefix, hidden=prefix.hidden.bfloat16()))
        network.model.language_model.layers[0].self_attn.o_proj = Other(2, 2)
        assert not fits(network, prefix), "a layer of another kind"


class Other(nn.Linear):
    """Does more than a product."""
