"""docs/algorithms.md: each formula computed as it stands there, in plain loops, and compared with the code."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from visual_grpo.config import GRPOConfig, SignalCheckConfig
from visual_grpo.grpo import checks, losses
from visual_grpo.grpo.losses import LOSSES, gdpo_advantages, group_advantages
from visual_grpo.grpo.optimisers import learning_rate_factor
from visual_grpo.grpo.update import Experience, Objective, UpdateStats, chunk_loss
from visual_grpo.policies import flow_sde
from visual_grpo.types import ReplayChunk, Rollout, Scores

PAGE = (Path(__file__).parents[1] / "docs" / "algorithms.md").read_text(encoding="utf-8")
N, G, S, D = 3, 4, 5, 24
EPSILON, BETA = 0.1, 0.3
Array = NDArray[np.float64]


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Array:
    return scale * np.random.default_rng(seed).normal(size=shape)


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.float32)


def rows_of_table(first: str) -> list[list[str]]:
    """The cells of the table whose head begins with ``first``, without backticks."""
    lines = PAGE.split(f"| {first} |", 1)[1].splitlines()[2:]
    table = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table]


def deviation(rewards: Array, scale: str) -> Array:
    """sigma of each sample, [N, G]."""
    centred = rewards - rewards.mean(1, keepdims=True)
    everywhere = np.ones_like(rewards)
    return {
        "group": rewards.std(1, ddof=1, keepdims=True) * everywhere,
        "batch": rewards.std(ddof=1) * everywhere,
        "batch_centred": np.sqrt((centred**2).sum() / (rewards.size - 1)) * everywhere,
        "none": everywhere - EPSILON,
    }[scale]


@pytest.mark.parametrize("scale", ["group", "batch", "batch_centred", "none"])
def test_advantages(scale: Any) -> None:
    rewards = drawn(N, G)
    want = (rewards - rewards.mean(1, keepdims=True)) / (deviation(rewards, scale) + EPSILON)
    got = group_advantages(tensor(rewards.reshape(-1)), G, scale=scale, epsilon=EPSILON, clip=0.9)
    np.testing.assert_allclose(got, want.clip(-0.9, 0.9).reshape(-1), atol=1e-5)
    assert [row[0] for row in rows_of_table("scale")] == ["group", "batch", "batch_centred", "none"]


def test_gdpo() -> None:
    rewards, weights = {"a": drawn(N, G), "b": drawn(N, G, seed=1, scale=9)}, {"a": 2.0, "b": -0.5}
    parts = [
        weights[k] * (r - r.mean(1, keepdims=True)) / (r.std(1, ddof=1, keepdims=True) + EPSILON)
        for k, r in rewards.items()
    ]
    a = np.sum(parts, axis=0)
    want = (a - a.mean(1, keepdims=True)) / (deviation(a, "batch_centred") + EPSILON)
    flat = {name: tensor(values.reshape(-1)) for name, values in rewards.items()}
    got = gdpo_advantages(flat, weights, G, epsilon=EPSILON, clip=1.2)
    np.testing.assert_allclose(got, want.clip(-1.2, 1.2).reshape(-1), atol=1e-5)


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("corrected", [False, True])
def test_the_losses_and_their_aggregation(name: Any, corrected: bool) -> None:
    rows = 6
    old, new = drawn(rows, S), drawn(rows, S) + drawn(rows, S, seed=1, scale=0.3)
    kl, advantages = abs(drawn(rows, S, seed=2)), drawn(rows, seed=3)
    mask = drawn(rows, S, seed=4) > -0.5
    mask[0] = False  # A row without a counted decision.
    kind = LOSSES[name]
    counted: list[list[int]] = [np.flatnonzero(row).tolist() for row in mask]

    def loss(i: int, t: int) -> float:
        steps = counted[i] if kind.sequence_ratio else [t]
        ratio = np.exp(np.mean([new[i, s] - old[i, s] for s in steps]))
        clipped = np.clip(ratio, 1 - kind.clip_low, 1 + kind.clip_high)
        of_kl = np.exp(new[i, t] - old[i, t]) if corrected else 1.0
        return float(-min(ratio * advantages[i], clipped * advantages[i]) + BETA * of_kl * kl[i, t])

    sums = [math.fsum(loss(i, t) for t in steps) for i, steps in enumerate(counted)]
    by_row = [total / len(steps) for total, steps in zip(sums, counted, strict=True) if len(steps)]
    want = {
        "grpo": np.mean(by_row),
        "gspo": np.mean(by_row),
        "dr_grpo": sum(sums) / (rows * S),
        "dapo": sum(sums) / mask.sum(),
    }[name]
    rollout: Rollout[None] = Rollout(
        prompts=(), samples=(), trajectory=None, log_probs=tensor(old), mask=torch.tensor(mask)
    )
    scores = Scores(total=torch.zeros(rows), rewards={}, parts={}, weights={})
    experience = Experience(rollout=rollout, scores=scores, rows=torch.arange(rows), advantages=tensor(advantages))
    config = GRPOConfig(
        loss=name,
        steps=1,
        prompts_per_step=1,
        group_size=rows,
        learning_rate=1,
        kl_weight=BETA,
        kl_correction=corrected,
    )
    chunk = ReplayChunk(steps=slice(0, S), log_probs=tensor(new), kl=tensor(kl))
    objective = Objective.of(config, [experience])
    assert float(chunk_loss(chunk, experience, torch.arange(rows), objective, UpdateStats())) == pytest.approx(want)


def test_the_table_of_losses() -> None:
    stated = {row[0]: row[1:5] for row in rows_of_table("`grpo.loss`")}
    assert stated == {
        name: [
            "per row" if kind.sequence_ratio else "per decision",
            f"{kind.clip_low:f}".rstrip("0"),
            f"{kind.clip_high:f}".rstrip("0"),
            kind.advantage_scale,
        ]
        for name, kind in LOSSES.items()
    }
    assert f"Log-ratios above {losses.MAX_LOG_RATIO:g} are cut to {losses.MAX_LOG_RATIO:g}" in PAGE


def test_k3() -> None:
    policy, reference = drawn(S), drawn(S, seed=1)
    d = reference - policy
    np.testing.assert_allclose(losses.k3_kl(tensor(policy), tensor(reference)), np.exp(d) - d - 1, rtol=1e-4)


@pytest.mark.parametrize(("sigma", "after"), [(1.0, 0.8), (0.6, 0.3), (0.3, 0.1)])
def test_stochastic_steps(sigma: float, after: float) -> None:
    clean, pure, a = drawn(2, 3), drawn(2, 3, seed=1), 0.7
    state, v = (1 - sigma) * clean + sigma * pure, pure - clean
    np.testing.assert_allclose(
        flow_sde.ode_step(tensor(v), tensor(state), sigma, after), (1 - after) * clean + after * pure, atol=1e-5
    )
    delta = after - sigma
    c = a * np.sqrt(sigma / (1 - (after if sigma == 1 else sigma)))
    mean = state * (1 + c**2 / (2 * sigma) * delta) + v * (1 + c**2 * (1 - sigma) / (2 * sigma)) * delta
    got, std = flow_sde.transition(tensor(v), tensor(state), sigma, after, a, "sde")
    np.testing.assert_allclose(got, mean, atol=1e-5)
    assert std == pytest.approx(c * np.sqrt(-delta))
    spread = after * np.sin(a * np.pi / 2)
    mean = (1 - after) * (state - sigma * v) + np.sqrt(after**2 - spread**2) * (state + (1 - sigma) * v)
    got, std = flow_sde.transition(tensor(v), tensor(state), sigma, after, a, "cps")
    np.testing.assert_allclose(got, mean, atol=1e-5)
    assert std == pytest.approx(spread)


def test_log_probability_kl_and_ratio_of_a_step() -> None:
    sample, mean, other, std = drawn(1, D), drawn(1, D, seed=1), drawn(1, D, seed=2), 0.7
    densities = -((sample - mean) ** 2) / (2 * std**2) - np.log(std) - 0.5 * np.log(2 * np.pi)
    tensors = tensor(sample), tensor(mean), tensor(other)
    assert float(flow_sde.log_prob(tensors[0], tensors[1], std)) == pytest.approx(densities.sum() / np.sqrt(D))
    kl = ((mean - other) ** 2 / (2 * std**2)).sum() / D
    assert float(flow_sde.transition_kl(tensors[1], tensors[2], std)) == pytest.approx(kl)
    e, shift = (sample - other) / std, mean - other
    ratio = (shift * e).sum() / np.sqrt(D)
    assert float(flow_sde.normalised_log_ratio(*tensors, std)) == pytest.approx(ratio, rel=1e-5)


def test_the_signal_checks_cosine_and_its_error() -> None:
    g = drawn(7, 11) + drawn(11, seed=1, scale=0.3)
    scaled = g / (np.sqrt((g**2).mean(0)) + 1e-8)

    def mean_cosine(vectors: list[Array]) -> float:
        pairs = itertools.permutations(vectors, 2)
        return float(np.mean([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs]))

    without = np.array([mean_cosine([v for j, v in enumerate(scaled) if j != m]) for m in range(7)])
    error = np.sqrt(6 / 7 * ((without - without.mean()) ** 2).sum())
    got = checks.mean_of_pairs(checks.update_cosines(tensor(g)))
    assert got == pytest.approx((mean_cosine(list(scaled)), error), rel=1e-4)


def test_the_signal_checks_rule() -> None:
    def verdict(cosine: float, error: float, rollouts: int, **check: float) -> str:
        rule = checks.SignalRule.of(SignalCheckConfig(**check), steps=99)
        return rule.verdict(checks.Signal(cosine=cosine, error=error, rollouts=rollouts, samples=8))

    assert verdict(0.021, 0.01, 3) == "passed"
    assert verdict(0.001, 0.0049, 6) == "refused", "2 e is below u = 1 / (99 + 1)"
    assert verdict(0.001, 0.0049, 5) == "unclear"
    assert verdict(0.001, 0.0051, 48) == "unclear"
    assert verdict(0.1, 0.01, 3, least_cosine=0.2) == "refused"
    assert verdict(0.1, 0.01, 3, least_cosine=0.11) == "unclear"
    assert list(itertools.islice(checks._looks(30), 4)) == [6, 12, 24, 30]


def test_the_learning_rate() -> None:
    W, U = 3, 10
    assert [learning_rate_factor(u, U, W, "cosine") for u in range(W)] == [(u + 1) / W for u in range(W)]
    for u in range(W, U):
        p = (u - W) / (U - W)
        assert learning_rate_factor(u, U, W, "constant") == 1
        assert learning_rate_factor(u, U, W, "linear") == pytest.approx(1 - p)
        assert learning_rate_factor(u, U, W, "cosine") == pytest.approx((1 + np.cos(np.pi * p)) / 2)
