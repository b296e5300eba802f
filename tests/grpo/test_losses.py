from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.toys import CountingScorer, ToyTokenPolicy
from visual_grpo.common.decisions import Likelihoods
from visual_grpo.common.errors import UserError
from visual_grpo.config import GRPOConfig
from visual_grpo.grpo import losses
from visual_grpo.grpo.trainer import GRPOTrainer

LOW, HIGH = 0.2, 0.3


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.25, 2.0, -2.5, -2.0),  # inside the upper clip
        (1.5, 2.0, -2.6, 0.0),  # above it, good action: clipped
        (1.5, -2.0, 3.0, 2.0),  # above it, bad action: the pessimistic side keeps its gradient
        (0.9, -2.0, 1.8, 2.0),  # inside the lower clip
        (0.5, -2.0, 1.6, 0.0),  # below it, bad action: clipped
        (0.75, -2.0, 1.6, 0.0),  # further than the lower clip, and not than the upper
        (0.5, 2.0, -1.0, -2.0),  # below it, good action: keeps its gradient
    ],
)
def test_the_clipped_surrogate_on_both_sides_of_both_clips(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    log_probs = torch.tensor([[ratio]]).log().requires_grad_()
    decisions = Likelihoods(steps=slice(0, 1), log_probs=log_probs, old_log_probs=torch.zeros(1, 1))
    algorithm = losses.GRPO(clip_low=LOW, clip_high=HIGH)
    value, metrics = algorithm(decisions, torch.tensor([advantage]), torch.ones(1, 1, dtype=torch.bool))
    value.sum().backward()
    assert value.item() == pytest.approx(loss, rel=1e-6)
    assert log_probs.grad is not None
    assert log_probs.grad.item() == pytest.approx(gradient * ratio)
    assert metrics["clip_fraction"].item() == (gradient == 0)


def test_k3_is_an_unbiased_non_negative_kl_with_its_gradient() -> None:
    policy = torch.tensor([0.1, -0.4, 0.7], requires_grad=True)
    reference = torch.tensor([0.5, 0.2, -0.3]).log_softmax(-1)
    log_probs = policy.log_softmax(-1)
    samples = losses.k3_kl(log_probs, reference)
    assert (samples >= 0).all()
    expected = (log_probs.exp() * samples).sum()  # its mean under the policy
    exact = torch.nn.functional.kl_div(reference, log_probs, log_target=True, reduction="sum")
    assert expected.item() == pytest.approx(exact.item(), rel=1e-5)
    samples.sum().backward()
    # d/dlp (exp(ref - lp) - (ref - lp) - 1) = 1 - exp(ref - lp), through the softmax.
    outer = (1 - (reference - log_probs).exp()).detach()
    want = outer - log_probs.exp().detach() * outer.sum()
    assert policy.grad is not None
    torch.testing.assert_close(policy.grad, want, rtol=1e-5, atol=1e-6)


def test_no_ratio_overflows_or_reads_what_does_not_count() -> None:
    far = torch.tensor([[200.0, -torch.inf]])
    new, mask = far.clone().requires_grad_(), torch.tensor([[True, False]])
    for value in (
        losses.importance_ratio(new),
        losses.sequence_ratio(new, mask),
        losses.k3_kl(-new, torch.zeros(1, 2)),
    ):
        assert value[0, 0].item() == pytest.approx(math.exp(20), rel=1e-5)
        (gradient,) = torch.autograd.grad(value[0, 0], [new])
        assert gradient[0, 0] == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss": "dppo", "clip_low": LOW}, "has no clip_low: policy would not be clipped"),
        ({"loss": "gspo", "clip_low": LOW, "clip_high": HIGH}, None),
        ({"loss": "nft", "target_kl": 0.1}, "but nft samples with an average of them"),
        ({"loss": "nft", "target_kl": 0.1, "average_decay": 0.0}, None),
        ({"loss": "awm", "sampler_correction": 2.0}, "but awm takes a sample without any"),
        ({"sampler_correction": 2.0, "old_log_probs": "sampler"}, "has to be replay"),
    ],
)
def test_a_script_is_refused_what_its_loss_does_not_read(given: dict[str, Any], said: str | None) -> None:
    least = {"steps": 1, "learning_rate": 1.0, "prompts_per_step": 1, "group_size": 2}
    config = GRPOConfig.model_validate(least | given)
    with pytest.raises(UserError, match=said) if said else nullcontext():
        GRPOTrainer(ToyTokenPolicy(), CountingScorer(), config)
