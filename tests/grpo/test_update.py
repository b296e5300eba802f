from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.grpo.test_trainer import config, trained
from tests.toys import ToyTokenPolicy
from visual_grpo.common.decisions import Likelihoods
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord, Rollout, Scores, TrainBatch
from visual_grpo.grpo.losses import DPPO, GRPO
from visual_grpo.grpo.metrics import UpdateMetrics
from visual_grpo.grpo.policy_loss import PolicyLoss

OLD = torch.tensor([[-1.0, -2.0, -0.5], [-0.3, -1.2, -0.7]])
NEW = torch.tensor([[-0.8, -2.1, -9.0], [-0.3, -0.9, -0.6]])
MASK = torch.tensor([[True, True, False], [True, True, True]])
TOTAL = torch.tensor([1.0, -1.0])


def batch(
    log_probs: Tensor = OLD, mask: Tensor = MASK, total: Tensor = TOTAL, old: Tensor | None = None
) -> TrainBatch[None]:
    """Two rows whose advantages are their totals. ``log_probs`` are the sampler's, and the old ones by default."""
    prompts = [PromptRecord(id="a", prompt="a")] * 2
    rollout = Rollout[None](prompts=prompts, samples=[0, 1], trajectory=None, log_probs=log_probs, mask=mask)
    scores = Scores(total=total, rewards={}, parts={}, weights={})
    old = log_probs if old is None else old
    return TrainBatch(rollout=rollout, scores=scores, rows=torch.arange(2), advantages=total, old_log_probs=old)


class WithoutReference(ToyTokenPolicy):
    """As a policy that was made without ``kl_reference=True``."""

    def replay(self, trajectory: Tensor, rows: Tensor) -> Iterator[Likelihoods]:
        for chunk in super().replay(trajectory, rows):
            yield replace(chunk, kl=None)


def test_a_weight_of_a_kl_that_the_policy_does_not_give_is_refused() -> None:
    policy = WithoutReference()
    with pytest.raises(UserError, match=r"kl_weight is 0\.1.*no KL.*load_policy\(\.\.\., kl_reference=True\)"):
        trained(policy, kl_weight=0.1)
    assert not policy.table.any()


def test_a_kl_that_was_not_measured_is_not_reported() -> None:
    _, without = trained(WithoutReference())
    _, measured = trained(ToyTokenPolicy())
    assert all("kl" not in step.values for step in without)
    assert all("kl" in step.values for step in measured)
    assert measured[-1].values["kl"] > 0


def test_the_limits_of_the_configuration_replace_those_of_the_loss() -> None:
    given = {"clip_low": 0.11, "clip_high": 0.44, "advantage_clip": 3.0}
    assert GRPO.of(config()) == GRPO(clip_low=0.2, clip_high=0.2)
    assert GRPO.of(config(**given)) == GRPO(clip_low=0.11, clip_high=0.44)
    assert DPPO.of(config(loss="dppo", divergence_limit=0.5, **given)) == DPPO(divergence_limit=0.5)


def test_what_an_update_reports_by_hand() -> None:
    """Five steps count; the sixth, which is far off, does not."""
    log_ratios = [0.2, -0.1, 0.0, 0.3, 0.1]
    stats = UpdateMetrics()
    chunk = Likelihoods(steps=slice(0, 3), log_probs=NEW)
    decisions = batch().compared(chunk, batch().rows)
    stats.record(*PolicyLoss(config(), [batch()])(decisions, batch(), batch().rows))
    stats.record_gap(decisions.gap(), MASK)
    means = stats.means()
    assert stats.steps == 5
    assert means["ratio"] == pytest.approx(sum(map(math.exp, log_ratios)) / 5, rel=1e-6)
    assert means["sampler_gap"] == pytest.approx(0.7 / 5, rel=1e-6)
    assert means["approx_kl"] == pytest.approx(sum(math.exp(r) - r - 1 for r in log_ratios) / 5, rel=1e-5)
    assert stats.max_gap == pytest.approx(0.3, rel=1e-6)


def test_of_all_ranks_the_largest_gap_counts() -> None:
    joined = UpdateMetrics()
    for gap in (0.1, 0.3, 0.2):
        joined.join(UpdateMetrics(max_gap=gap))
    assert joined.max_gap == 0.3
