"""Tokens are drawn as by the model's own forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests.conftest import SIZE, stir
from tests.models.token_policies import forward
from tests.models.tokens.test_token_policy import RECORDS
from visual_grpo.models.tokens import generation
from visual_grpo.models.tokens.generation import SampledTokens, sample_tokens
from visual_grpo.models.tokens.probabilities import TokenSampler
from visual_grpo.training.components import load_policy


def draw(folder: Path, attention: str, rows: int) -> SampledTokens[Any]:
    """Rows of prompts of different lengths, in batches of different sizes."""
    policy: Any = load_policy(str(folder), size=SIZE, device="cpu")
    stir(policy)
    policy.model.network.set_attn_implementation(attention)
    records = [RECORDS[row % len(RECORDS)] for row in range(rows)]
    return sample_tokens(policy.model, records, range(rows), TokenSampler(), 4)


@pytest.mark.parametrize(("attention", "rows"), [("sdpa", 1), ("eager", 6)])  # One prompt needs no mask.
def test_masks_and_rotary_tables_are_those_of_the_models_own_forward(
    pipeline_folder: Path, monkeypatch: pytest.MonkeyPatch, attention: str, rows: int
) -> None:
    """Bit for bit."""
    found = draw(pipeline_folder, attention, rows)  # The adapter is not merged: by the model's layers.

    class Stock:
        def __init__(self, model: Any, prefix: Any, length: int) -> None:
            self.model, self.cache, self.mask = model, DynamicCache(), prefix.mask
            for number, layer in enumerate(prefix.cache):
                self.cache.update(layer.keys, layer.values, number)
            self.positions = iter(prefix.token_positions.split(1, -1))

        def next(self, embeds: torch.Tensor) -> torch.Tensor:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], 1)
            return forward(self.model, embeds, self.mask, next(self.positions), self.cache)

    monkeypatch.setattr(generation, "TokenSteps", Stock)
    expected = draw(pipeline_folder, attention, rows)
    assert torch.equal(found.trajectory.tokens, expected.trajectory.tokens)
    assert torch.equal(found.log_probs, expected.log_probs)
    assert torch.equal(found.entropy, expected.entropy)
