"""Small token policies whose every weight is felt, and prompts for their language models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from tests.conftest import SIZE, stir
from visual_grpo.models.tokens.generation import CapturedSteps
from visual_grpo.models.tokens.prompt_cache import Prompts
from visual_grpo.training.components import load_policy


@pytest.fixture(params=["pipeline_folder", "vl_folder"])
def any_policy(request: pytest.FixtureRequest) -> Any:
    """GLM-Image's, of which a part of each head is turned, and Qwen2.5-VL's; both with biases."""
    policy: Any = load_policy(str(request.getfixturevalue(request.param)), size=SIZE, device="cpu")
    stir(policy)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in policy.model.network.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return policy


def prompts_of(policy: Any, before: int, tokens: int, padded: int) -> Prompts:
    """Two prompts of ``before`` tokens, of which the second has ``padded`` fewer."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(2, before, dtype=torch.int64)
    mask[1, :padded] = 0
    positions = torch.arange(before + tokens).expand(3, 2, -1).clone()
    positions[1] += 2  # A picture's rows and columns run apart from its text.
    positions[2, 1] *= 3
    width = policy.model.network.config.get_text_config().hidden_size
    return Prompts(
        embeds=torch.randn(2, before, width, generator=generator),
        mask=mask,
        positions=positions[..., :before],
        token_positions=positions[..., before:],
    )


def hidden_whole(model: Any, prompts: Prompts, prompt_of_row: Tensor, tokens: Tensor) -> Tensor:
    """[b, T, H] by one forward of each row's prompt and tokens, which shares nothing."""
    own, count = prompt_of_row, tokens.shape[1]
    embeds = torch.cat([prompts.embeds[own], model.model.get_input_embeddings()(tokens[:, :-1])], 1)
    mask = torch.cat([prompts.mask[own], torch.ones_like(tokens[:, :-1])], 1)
    positions = torch.cat([prompts.positions[:, own], prompts.token_positions[:, own, : count - 1]], 2)
    return forward(model, embeds, mask, positions, None)[:, -count:]


def forward(model: Any, embeds: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache | None) -> Tensor:
    """Hidden states [b, L, H] for embeddings [b, L, H] after what ``cache`` holds, by the model's own forward.

    ``mask``: [b, all tokens] int64, 1 = a real one.
    """
    output = model.model.language_model(
        inputs_embeds=embeds,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=cache is not None,
    )
    hidden: Tensor = output.last_hidden_state
    return hidden


class CapturedOnCpu(CapturedSteps):
    """Where there is no CUDA graph: a replay runs the step again, and leaves its result where the captured one did."""

    def _capture(self) -> None:
        self._step()
        self._result = torch.empty_like(self._result)
        self._graph: Any = SimpleNamespace(replay=lambda: self._result.copy_(self._step()))
