"""The token policy of any model, with the small GLM-Image: log-probs are those of the distribution drawn from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.conftest import SIZE, stir
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import SamplerConfig
from visual_grpo.models.families.glm_image.model import GlmImage
from visual_grpo.models.tokens.probabilities import TokenSampler
from visual_grpo.models.tokens.prompt_cache import Prompts
from visual_grpo.models.tokens.token_policy import TokenPolicy
from visual_grpo.training.components import load_policy

RECORDS = [
    PromptRecord(id=str(i), prompt=text)
    for i, text in enumerate(["a red circle", "a small yellow square at the bottom, with many more words", "画一只猫"])
]
WARM = SamplerConfig(temperature=1.7, top_p=1.0, top_k=0, steps=2, guidance_scale=1.0)


@torch.no_grad()
def whole_distribution(glm_image: GlmImage, tokens: Tensor, temperature: float) -> Tensor:
    """[B, T, V] log-probs by the model's own ``generate``, which is made to say ``tokens``, one row a record."""
    model = glm_image.tokens(WARM)
    inputs = model.processed(RECORDS)
    start, count = inputs["input_ids"].shape[1], tokens.shape[1]

    def forced(row: int, said: Tensor) -> list[int]:
        return [int(tokens[row, len(said) - start])]

    output = model.network.generate(
        **inputs,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        prefix_allowed_tokens_fn=forced,
        return_dict_in_generate=True,
        output_logits=True,
    )
    assert torch.equal(output.sequences[:, start:], tokens)
    logits: Tensor = torch.stack(output.logits, 1)[..., : model.codebook]
    return (logits.float() / temperature).log_softmax(-1)


def test_log_probs_are_those_of_generate(glm_image: GlmImage, ar_policy: TokenPolicy[Prompts]) -> None:
    """Sampled and replayed. Wrong positions of the generated tokens would agree with one another, but not with it."""
    got = ar_policy.rollout(RECORDS, 1, torch.Generator().manual_seed(0))
    tokens = got.trajectory.tokens
    want = whole_distribution(glm_image, tokens, 1.0).gather(2, tokens[..., None])[..., 0]
    torch.testing.assert_close(got.log_probs, want, rtol=0, atol=5e-5)
    (chunk,) = ar_policy.replay(got.trajectory, torch.arange(3))
    torch.testing.assert_close(chunk.log_probs.detach(), want, rtol=0, atol=5e-5)


def test_a_truncated_sampler_says_whole_log_probs(glm_image: GlmImage, ar_policy: TokenPolicy[Prompts]) -> None:
    """At its temperature, with the entropy of the same distribution."""
    for truncated in ({"top_k": 3}, {"top_p": 0.5}):
        sampler = WARM.model_copy(update=truncated)
        sampled = glm_image.sample_tokens(RECORDS, [1, 2, 3], sampler)
        tokens = sampled.trajectory.tokens
        want = whole_distribution(glm_image, tokens, 1.7)
        torch.testing.assert_close(sampled.log_probs, want.gather(2, tokens[..., None])[..., 0], rtol=0, atol=5e-5)
        torch.testing.assert_close(sampled.entropy, -(want.exp() * want).sum(-1), rtol=0, atol=1e-4)
        if "top_k" in truncated:
            likeliest = want.topk(3).indices
            assert (likeliest == tokens[..., None]).any(-1).all()


def test_training_samples_are_of_the_whole_distribution(pipeline_folder: Path) -> None:
    def load(sampler: SamplerConfig) -> TokenPolicy[Prompts]:
        policy = load_policy(str(pipeline_folder), size=SIZE, rollout=sampler, device="cpu")
        assert isinstance(policy, TokenPolicy)
        return policy

    policy = load(SamplerConfig(steps=2, guidance_scale=1.0))
    assert policy.model.sampler(policy.sampler) == TokenSampler(temperature=1.0, top_p=1.0, top_k=0)
    with pytest.raises(ValueError, match="no top_k above 0"):
        load(SamplerConfig(top_k=5, steps=2, guidance_scale=1.0))


def test_a_replay_is_at_the_samplers_temperature(pipeline_folder: Path) -> None:
    policy = load_policy(str(pipeline_folder), size=SIZE, rollout=WARM, kl_reference=True, device="cpu")
    got = policy.rollout(RECORDS, 2, torch.Generator().manual_seed(0))
    rows = torch.arange(6)
    (chunk,) = policy.replay(got.trajectory, rows)
    torch.testing.assert_close(chunk.log_probs, got.log_probs, rtol=0, atol=5e-5)
    # A fresh adapter has no effect, so that the reference is the policy.
    torch.testing.assert_close(got.trajectory.reference_log_probs, got.log_probs, rtol=0, atol=5e-5)
    stir(policy)
    (moved,) = policy.replay(got.trajectory, rows)
    assert (moved.log_probs - got.log_probs).abs().max() > 1e-2
