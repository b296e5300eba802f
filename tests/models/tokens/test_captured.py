"""Tokens drawn by a captured step are those drawn with a cache that grows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.token_policies import CapturedOnCpu
from tests.models.tokens.test_generation import draw
from visual_grpo.models.tokens import generation


@pytest.mark.parametrize(("attention", "rows"), [("sdpa", 1), ("eager", 6)])
def test_captured_steps_draw_what_growing_ones_draw(
    pipeline_folder: Path, monkeypatch: pytest.MonkeyPatch, attention: str, rows: int
) -> None:
    """Prompts of several lengths; what a hidden place holds is never seen."""
    expected = draw(pipeline_folder, attention, rows)
    monkeypatch.setattr(generation, "TokenSteps", CapturedOnCpu)
    found = draw(pipeline_folder, attention, rows)
    assert torch.equal(found.trajectory.tokens, expected.trajectory.tokens)
    # Down to -10 from logits of tens: a few units in the last place of float32.
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(found.entropy, expected.entropy, rtol=0, atol=1e-5)
