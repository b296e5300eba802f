"""Tokens drawn with a static cache are those drawn with a growing one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import SIZE, stir
from tests.models.tokens.test_policy import RECORDS
from visual_grpo.config import PolicyConfig
from visual_grpo.models.tokens import generation
from visual_grpo.models.tokens.generation import SampledTokens, sample_tokens
from visual_grpo.models.tokens.probabilities import TokenSampler
from visual_grpo.models.tokens.prompt_cache import forward
from visual_grpo.training.components import load_policy


def draw(folder: Path, cache: Any, attention: str = "sdpa", rows: int = 6) -> SampledTokens[Any]:
    """Rows of prompts of different lengths, in batches of different sizes."""
    policy: Any = load_policy(str(folder), size=SIZE, device="cpu")
    stir(policy)
    policy.model.network.set_attn_implementation(attention)
    records = [RECORDS[row % len(RECORDS)] for row in range(rows)]
    return sample_tokens(policy.model, records, range(rows), TokenSampler(), 4, cache)


def assert_same(one: SampledTokens[Any], other: SampledTokens[Any]) -> None:
    assert torch.equal(one.trajectory.tokens, other.trajectory.tokens)
    # Down to -10 from logits of tens: a few units in the last place of float32.
    torch.testing.assert_close(one.log_probs, other.log_probs, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(one.entropy, other.entropy, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("attention", "rows"), [("sdpa", 6), ("eager", 6), ("sdpa", 1)])
def test_the_same_tokens_and_log_probs(pipeline_folder: Path, attention: str, rows: int) -> None:
    """One prompt needs no padding."""
    assert_same(*(draw(pipeline_folder, cache, attention, rows) for cache in ("static", "growing")))


@pytest.mark.parametrize(("attention", "rows"), [("sdpa", 1), ("sdpa", 6), ("eager", 6)])  # One prompt needs no mask.
def test_masks_and_rotary_tables_are_those_of_the_models_own_forward(
    pipeline_folder: Path, monkeypatch: pytest.MonkeyPatch, attention: str, rows: int
) -> None:
    """Bit for bit."""
    found = draw(pipeline_folder, "growing", attention, rows)  # The adapter is not merged: by the model's layers.

    class Stock:
        def __init__(self, model: Any, prefix: Any, length: int) -> None:
            self.model, self.cache, self.mask = model, prefix.cache, prefix.mask
            self.positions = iter(prefix.token_positions.split(1, -1))

        def next(self, embeds: torch.Tensor) -> torch.Tensor:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], 1)
            return forward(self.model, embeds, self.mask, next(self.positions), self.cache)

    monkeypatch.setattr(generation, "GrowingSteps", Stock)
    expected = draw(pipeline_folder, "growing", attention, rows)
    assert torch.equal(found.trajectory.tokens, expected.trajectory.tokens)
    assert torch.equal(found.log_probs, expected.log_probs)
    assert torch.equal(found.entropy, expected.entropy)


def test_the_parameter_decides(pipeline_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rollouts, of which the replay's ratio is 1 with either."""
    made = []
    real = generation.StaticSteps.__init__

    def init(*args: Any) -> None:
        made.append(args)
        real(*args)

    monkeypatch.setattr(generation.StaticSteps, "__init__", init)
    policy = load_policy(str(pipeline_folder), size=SIZE, policy=PolicyConfig(kv_cache="static"), device="cpu")
    rollout = policy.rollout(RECORDS[:2], 2, torch.Generator().manual_seed(0))
    (chunk,) = policy.replay(rollout.trajectory, torch.arange(4))
    assert made
    torch.testing.assert_close(chunk.log_probs.detach(), rollout.log_probs, rtol=0, atol=5e-5)


class Graph:
    """Launches what was captured, as a CUDA graph does: the same step, whose result lies where it lay."""

    captured = 0
    step: Callable[[], torch.Tensor]
    out: torch.Tensor

    def replay(self) -> None:
        self.out.copy_(self.step())


def test_a_captured_step_gives_the_same(pipeline_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a capture must leave as it was: it runs one step for real before, and none while it captures."""
    real = generation.StaticSteps.__init__
    current: list[Any] = []

    def init(self: Any, *args: Any) -> None:
        real(self, *args)
        self._captures = True
        current[:] = [self]

    @contextmanager
    def graph(made: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        counters = [layer.cumulative_length for layer in current[0]._cache.layers]
        before = [counter.clone() for counter in counters]
        yield
        made.step, made.out = current[0]._step, current[0]._hidden
        for counter, value in zip(counters, before, strict=True):
            counter.copy_(value)
        Graph.captured += 1

    class Stream:
        def wait_stream(self, other: Any) -> None:
            """Nothing is to be waited for on a CPU."""

    @contextmanager
    def stream(_: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(generation.StaticSteps, "__init__", init)
    for name, value in {"CUDAGraph": Graph, "graph": graph, "Stream": Stream, "stream": stream}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    found = draw(pipeline_folder, "static")
    assert Graph.captured == 2  # Of each batch once.
    monkeypatch.undo()
    assert_same(found, draw(pipeline_folder, "growing"))
