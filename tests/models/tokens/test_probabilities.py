from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from visual_grpo.config import SamplerConfig
from visual_grpo.models.tokens.probabilities import TokenSampler, chosen_log_probs, entropy, row_uniforms, sample_ids


def test_warping_is_that_of_generate() -> None:
    logits = 3 * torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    for temperature, top_k, top_p in [(0.9, 0, 0.75), (1.3, 7, 1.0), (0.7, 12, 0.6)]:
        processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
        processors += [TopKLogitsWarper(top_k)] if top_k else []
        processors += [TopPLogitsWarper(top_p)] if top_p < 1 else []
        want = processors(torch.zeros(40, 1, dtype=torch.long), logits)
        got = TokenSampler(temperature=temperature, top_k=top_k, top_p=top_p).warp(logits)
        assert torch.equal(got, want)
        assert got.isinf().any() == (bool(top_k) or top_p < 1)


def test_greedy_decoding_takes_the_first_of_equal_logits() -> None:
    """Half precision rounds many logits to equal ones."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0], [-torch.inf, -2.0, -2.0, -torch.inf]])
    probabilities = TokenSampler(top_k=1).warp(logits).softmax(-1)
    for uniform in (0.0, 0.4, 0.9):
        assert sample_ids(probabilities, torch.full((2,), uniform)).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("stock", "settings", "expected"),
    [
        ({"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}, {}, (0.7, 0.8, 20)),
        ({"do_sample": True, "temperature": 0.9, "top_k": 0, "top_p": 0.75}, {}, (0.9, 0.75, 0)),
        ({"do_sample": True}, {}, (1.0, 1.0, 50)),
        ({"do_sample": True}, {"temperature": 2.0, "top_p": 0.5, "top_k": 0}, (2.0, 0.5, 0)),
        ({}, {}, (1.0, 1.0, 1)),
        ({"top_k": 5}, {"top_p": 0.5}, (1.0, 1.0, 1)),
        ({}, {"temperature": 0.5}, (0.5, 1.0, 50)),
        ({}, {"temperature": 0.5, "top_k": 1}, (0.5, 1.0, 1)),
        ({"temperature": 0.7}, {"top_k": 3}, (0.7, 1.0, 3)),
    ],
)
def test_settings_that_are_not_given_are_those_of_generate(
    stock: dict[str, Any], settings: dict[str, Any], expected: tuple[float, float, int]
) -> None:
    config = GenerationConfig(**stock)
    got = TokenSampler.of(SamplerConfig(**settings), config, do_sample=bool(config.do_sample))
    assert (got.temperature, got.top_p, got.top_k) == expected


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.05, 0.25, 0.0])
    count = 40_000
    uniforms = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids = sample_ids(probabilities.expand(count, -1), uniforms)
    frequency = torch.bincount(ids, minlength=6) / count
    assert frequency[1] == 0
    assert frequency[5] == 0
    torch.testing.assert_close(frequency, probabilities, rtol=0, atol=0.01)


def test_the_ends_of_the_interval_never_draw_an_impossible_id() -> None:
    probabilities = torch.tensor([[0.0, 0.3, 0.7, 0.0]])
    assert sample_ids(probabilities, torch.tensor([0.0], dtype=torch.float64)).item() == 1
    assert sample_ids(probabilities, torch.tensor([1 - 2**-53], dtype=torch.float64)).item() == 2


def test_a_rows_uniforms_are_its_seeds() -> None:
    together = row_uniforms([3, 9, 3], 5)
    assert torch.equal(together[1], row_uniforms([9], 5)[0])
    assert torch.equal(together[0], together[2])
    assert not torch.equal(together[0], together[1])


@pytest.mark.parametrize("chunk", [3, 100])
def test_chosen_log_probs_and_their_gradient(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visual_grpo.models.tokens.probabilities.CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, 8, generator=generator, requires_grad=True)
    head = torch.randn(11, 8, generator=generator)
    ids = torch.randint(11, (2, 5), generator=generator)
    outer = torch.randn(2, 5, generator=generator)

    plain = ((hidden @ head.t()) / 0.7).log_softmax(-1).gather(2, ids[..., None])[..., 0]
    (want,) = torch.autograd.grad((plain * outer).sum(), [hidden])
    got = chosen_log_probs(hidden, head, ids, 0.7)
    torch.testing.assert_close(got, plain, rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad((got * outer).sum(), [hidden])
    torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-5)


def test_entropy_of_a_known_distribution() -> None:
    log_probs = torch.tensor([[0.25, 0.25, 0.5, 0.0], [1.0, 0.0, 0.0, 0.0]]).log()
    torch.testing.assert_close(entropy(log_probs, log_probs.exp()), torch.tensor([1.0397208, 0.0]))
